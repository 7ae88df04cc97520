"""Byte planes: a column of integers, split by byte, each plane one zstd stream (SPEC 4.2, 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from .constants import MAX_PLANE_BYTES, MAX_WINDOW_BYTES, ZSTD_LEVEL
from .errors import CorruptFrame, LimitExceeded

Unsigned = npt.NDArray[np.unsignedinteger]
Stream = bytes | memoryview


class PlaneEncoder:
    """Turns columns into compressed planes; not shared between threads."""

    def __init__(self) -> None:
        # planes are noise and runs: a short match costs more than the Huffman codes it stands for
        parameters = zstandard.ZstdCompressionParameters.from_level(
            ZSTD_LEVEL, min_match=7, hash_log=6, write_content_size=True, write_checksum=False
        )
        self._zstd = zstandard.ZstdCompressor(compression_params=parameters)

    def encode(self, column: Unsigned, planes: int) -> list[bytes]:
        """Return the streams of a column, lowest byte first; a plane of zeros is an empty stream."""
        column = np.ascontiguousarray(column).reshape(-1)
        octets = column.astype(column.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(len(column), -1)
        return [self._compress(octets[:, i]) for i in range(planes)]

    def _compress(self, plane: npt.NDArray[np.uint8]) -> bytes:
        return self._zstd.compress(plane.tobytes()) if plane.any() else b""


class PlaneDecoder:
    """Reads planes back; not shared between threads."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def decode(self, streams: Sequence[Stream], count: int, dtype: type[np.unsignedinteger]) -> Unsigned:
        """Return the `count` integers whose byte planes are in `streams`, lowest byte first.

        Raises:
            LimitExceeded: a plane would be larger than the limit (SPEC 9).
            CorruptFrame: a stream is not exactly one zstd frame of exactly `count` bytes (SPEC 4.2).
        """
        if count > MAX_PLANE_BYTES:
            raise LimitExceeded(f"a plane of {count} bytes is above the limit of {MAX_PLANE_BYTES} (SPEC 9)")
        column: Unsigned | None = None
        for i, stream in enumerate(streams):
            if len(stream):
                part = self._plane(stream, count).astype(dtype)
                if i:
                    part <<= 8 * i
                column = part if column is None else np.bitwise_or(column, part, out=column)
        return np.zeros(count, dtype) if column is None else column

    def _plane(self, stream: Stream, size: int) -> npt.NDArray[np.uint8]:
        try:
            # the declared size is what zstandard allocates, whatever max_output_size says
            declared = zstandard.get_frame_parameters(stream)
            if declared.content_size != size:
                raise CorruptFrame(f"a stream declares {declared.content_size} bytes where {size} are due (SPEC 4.2)")
            # one call that has room for all of the content skips libzstd's own look at the window
            if declared.window_size > MAX_WINDOW_BYTES:
                raise CorruptFrame(f"a stream needs a window of {declared.window_size} bytes (SPEC 9)")
            plane = self._zstd.decompress(stream, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptFrame(f"a stream is not one zstd frame: {error} (SPEC 4.2)") from error
        if len(plane) != size:
            raise CorruptFrame(f"a stream holds {len(plane)} bytes where {size} are due (SPEC 4.2)")
        return np.frombuffer(plane, np.uint8)
