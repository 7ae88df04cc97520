"""Byte planes: a column of integers, split by byte, each plane one zstd stream (SPEC 5.2, 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from .constants import MAX_PLANE_BYTES, MAX_WINDOW_BYTES, ZSTD_LEVEL
from .errors import CorruptFrame, LimitExceeded

UInt32 = npt.NDArray[np.uint32]


class PlaneEncoder:
    """Turns columns into compressed planes; not shared between threads."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=False)

    def encode(self, column: npt.NDArray[np.unsignedinteger], planes: int) -> list[bytes]:
        """Return the streams of a column, lowest byte first; a plane of zeros is an empty stream."""
        octets = np.ascontiguousarray(column, dtype="<u4").view(np.uint8).reshape(-1, 4)
        return [self._compress(octets[:, i]) for i in range(planes)]

    def _compress(self, plane: npt.NDArray[np.uint8]) -> bytes:
        return self._zstd.compress(plane.tobytes()) if plane.any() else b""


def decode_planes(streams: Sequence[bytes | memoryview], count: int) -> UInt32:
    """Return the `count` integers whose byte planes are in `streams`, lowest byte first.

    Raises:
        LimitExceeded: a plane would be larger than the limit (SPEC 8).
        CorruptFrame: a stream is not exactly one zstd frame of exactly `count` bytes (SPEC 5.2).
    """
    if count > MAX_PLANE_BYTES:
        raise LimitExceeded(f"a plane of {count} bytes is above the limit of {MAX_PLANE_BYTES} (SPEC 8)")
    octets = np.zeros((count, 4), dtype=np.uint8)
    for i, stream in enumerate(streams):
        if len(stream):
            octets[:, i] = np.frombuffer(_decompress(stream, count), dtype=np.uint8)
    return octets.reshape(-1).view("<u4")


def _decompress(stream: bytes | memoryview, size: int) -> bytes:
    try:
        # the declared size is what zstandard allocates, whatever max_output_size says
        declared = zstandard.frame_content_size(stream)
        if declared != size:
            raise CorruptFrame(f"a stream declares {declared} bytes where {size} are due (SPEC 5.2)")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        plane = decompressor.decompress(stream, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptFrame(f"a stream is not one zstd frame: {error} (SPEC 5.2)") from error
    if len(plane) != size:
        raise CorruptFrame(f"a stream holds {len(plane)} bytes where {size} are due (SPEC 5.2)")
    return plane
