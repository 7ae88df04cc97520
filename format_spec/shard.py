"""A shard: header, frames, index, trailer (SPEC 2). The writer streams; the reader verifies."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from .constants import MAX_SEQUENCE_POSITIONS, MAX_SEQUENCES, PAD_CODE, TRAILER_FORMAT, TRAILER_MAGIC
from .errors import CorruptFrame, CorruptIndex, InvalidRows, LimitExceeded, NotAShard, TruncatedShard
from .frame import decode_frame, encode_frame
from .header import HEADER_SIZE, ShardHeader, check_version, read_fixed_header, read_json_header
from .planes import PlaneEncoder
from .rows import ScoredSequence
from .version import FORMAT_MAJOR, FORMAT_MINOR

TRAILER_SIZE = struct.calcsize(TRAILER_FORMAT)
INDEX_DTYPE = np.dtype([("offset", "<u8"), ("bytes", "<u4"), ("positions", "<u4"), ("key", "V8"), ("xxh3", "<u8")])


class ShardWriter:
    """Writes a shard to an open binary file, one sequence after the other.

    The same sequences give the same bytes from the same library versions. Making the file durable is
    the caller's part.
    """

    def __init__(self, file: BinaryIO, header: ShardHeader) -> None:
        self.header = header
        self._file = file
        self._encoder = PlaneEncoder()
        self._index: list[tuple[int, int, int, bytes, int]] = []
        prefix = header.to_bytes()
        file.write(prefix)
        self._offset = len(prefix)

    @property
    def num_sequences(self) -> int:
        """Sequences written so far."""
        return len(self._index)

    @property
    def num_positions(self) -> int:
        """Tokens written so far."""
        return sum(entry[2] for entry in self._index)

    def add(self, sequence: ScoredSequence) -> None:
        """Append a sequence.

        Raises:
            InvalidRows: the format cannot hold these rows; nothing was written.
            LimitExceeded: the sequence or the shard would be too large (SPEC 8); nothing was written.
        """
        if len(self._index) == MAX_SEQUENCES:
            raise LimitExceeded(f"a shard holds at most {MAX_SEQUENCES} sequences (SPEC 8)")
        frame = encode_frame(sequence, self.header, self._encoder)
        self._file.write(frame)
        checksum = xxhash.xxh3_64_intdigest(frame)
        self._index.append((self._offset, len(frame), len(sequence), sequence.key[:8], checksum))
        self._offset += len(frame)

    def finish(self) -> int:
        """Write index and trailer; return the size of the shard in bytes."""
        if not self._index:
            raise InvalidRows("a shard needs at least one sequence (SPEC 6.1)")
        index = np.array(self._index, dtype=INDEX_DTYPE).tobytes()
        size = self._offset + len(index) + TRAILER_SIZE
        trailer = struct.pack(
            TRAILER_FORMAT,
            self._offset,
            self.num_sequences,
            self.num_positions,
            xxhash.xxh3_64_intdigest(index),
            size,
            FORMAT_MAJOR,
            FORMAT_MINOR,
            TRAILER_MAGIC,
        )
        self._file.write(index + trailer)
        return size


class Shard:
    """An open shard, readable at any sequence; header and index are verified on opening.

    Each frame is checked against its checksum before it is decompressed. Safe to share between
    threads and over a fork: reads carry their own offset.

    Raises:
        ShardError: the subclass that names the broken clause of SPEC.md.
    """

    def __init__(self, data: bytes) -> None:
        self._fd: int | None = None
        self._data = data
        self.size = len(data)
        self._load()

    @classmethod
    def open(cls, path: Path | str) -> Shard:
        """Open the shard at `path`."""
        shard = cls.__new__(cls)
        shard._fd = os.open(path, os.O_RDONLY)
        try:
            shard._data = b""
            shard.size = os.fstat(shard._fd).st_size
            shard._load()
        except BaseException:
            shard.close()
            raise
        return shard

    @property
    def num_sequences(self) -> int:
        """Sequences in the shard."""
        return len(self.index)

    @property
    def num_positions(self) -> int:
        """Tokens in the shard."""
        return int(self.index["positions"].sum())

    def read(self, number: int) -> ScoredSequence:
        """Return sequence `number`, 0-based.

        Raises:
            CorruptFrame: its bytes are damaged or break a rule (SPEC 5).
        """
        if not 0 <= number < len(self.index):
            raise IndexError(f"sequence {number} of a shard of {len(self.index)}")
        entry = self.index[number]
        frame = self._read(int(entry["offset"]), int(entry["bytes"]))
        if xxhash.xxh3_64_intdigest(frame) != int(entry["xxh3"]):
            raise CorruptFrame(f"sequence {number} does not match its checksum (SPEC 6.3)")
        sequence = decode_frame(frame, self.header, int(entry["positions"]))
        if sequence.key[:8] != bytes(entry["key"]):
            raise CorruptFrame(f"sequence {number} holds other tokens than the index says (SPEC 6.2)")
        return sequence

    def __iter__(self) -> Iterator[ScoredSequence]:
        return (self.read(number) for number in range(len(self.index)))

    def verify(self) -> None:
        """Read everything, and check the rules that a reader leaves out for speed (SPEC 5.4, 5.7).

        Raises:
            CorruptFrame: the first sequence that breaks a rule.
        """
        for number, sequence in enumerate(self):
            rows = sequence.rows
            filled = np.where(rows.token_ids_PK < 0, PAD_CODE + np.arange(rows.k), rows.token_ids_PK)
            if (np.diff(np.sort(filled, axis=1), axis=1) == 0).any():
                raise CorruptFrame(f"a row of sequence {number} names a token twice (SPEC 5.4)")
            tail = rows.tail_token_ids_PN
            if tail is not None:
                drawn = np.where(tail < 0, -2, tail)
                if any((drawn[:, j, None] == rows.token_ids_PK).any() for j in range(rows.tail_samples)):
                    raise CorruptFrame(f"a tail sample of sequence {number} is in its row's support (SPEC 5.7)")

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()

    def _read(self, offset: int, length: int) -> bytes:
        data = self._data[offset : offset + length] if self._fd is None else os.pread(self._fd, length, offset)
        if len(data) != length:
            raise TruncatedShard(f"{length} bytes at {offset} are not all there: got {len(data)} (SPEC 7.2)")
        return data

    def _load(self) -> None:
        length, checksum = read_fixed_header(self._read(0, min(HEADER_SIZE, self.size)))
        begin = HEADER_SIZE + length
        if self.size < begin + TRAILER_SIZE:
            raise TruncatedShard(f"a file of {self.size} bytes ends before its trailer (SPEC 7.2)")
        self.header = read_json_header(self._read(HEADER_SIZE, length), checksum)
        self.index = self._load_index(begin)

    def _load_index(self, begin: int) -> npt.NDArray[np.void]:
        trailer = self._read(self.size - TRAILER_SIZE, TRAILER_SIZE)
        offset, sequences, positions, checksum, size, major, minor, magic = struct.unpack(TRAILER_FORMAT, trailer)
        if magic != TRAILER_MAGIC:
            raise NotAShard(f"does not end with {TRAILER_MAGIC!r}: cut off or not a shard (SPEC 7.1)")
        check_version(major, minor)
        if size != self.size:
            raise TruncatedShard(f"the trailer says {size} bytes, the file has {self.size} (SPEC 7.2)")
        if not 1 <= sequences <= MAX_SEQUENCES:
            raise LimitExceeded(f"{sequences} sequences; allowed are 1 to {MAX_SEQUENCES} (SPEC 8)")
        if offset + sequences * INDEX_DTYPE.itemsize + TRAILER_SIZE != size:
            raise CorruptIndex("the index does not fill the space before the trailer (SPEC 6.1)")
        raw = self._read(offset, sequences * INDEX_DTYPE.itemsize)
        if xxhash.xxh3_64_intdigest(raw) != checksum:
            raise CorruptIndex("the index does not match its checksum (SPEC 6.1)")
        index = np.frombuffer(raw, dtype=INDEX_DTYPE)
        ends = index["offset"] + index["bytes"]
        if int(index["offset"][0]) != begin or int(ends[-1]) != offset or (index["offset"][1:] != ends[:-1]).any():
            raise CorruptIndex("the frames do not tile the space between header and index (SPEC 6.2)")
        if int(index["positions"].min()) < 2 or int(index["positions"].max()) > MAX_SEQUENCE_POSITIONS:
            raise LimitExceeded(f"a sequence must have 2 to {MAX_SEQUENCE_POSITIONS} tokens (SPEC 8)")
        if int(index["positions"].sum()) != positions:
            raise CorruptIndex("the positions of the index do not add up to the trailer's (SPEC 6.2)")
        return index
