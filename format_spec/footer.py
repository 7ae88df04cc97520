"""What stands around the frames: head, footer (metadata, table, index) and trailer (SPEC 3, 5 to 8)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from .constants import (
    FEATURE_REMAP,
    HEADER_FORMAT,
    HEADER_MAGIC,
    KNOWN_FEATURES,
    MAX_METADATA_BYTES,
    MAX_SEQUENCE_POSITIONS,
    MAX_SEQUENCES,
    TRAILER_FORMAT,
    TRAILER_MAGIC,
)
from .errors import (
    CorruptFooter,
    CorruptFrame,
    CorruptIndex,
    CorruptTable,
    LimitExceeded,
    NotAShard,
    TruncatedShard,
    UnsupportedFeature,
    UnsupportedVersion,
)
from .metadata import ShardMetadata
from .planes import PlaneDecoder
from .remap import RemapTable
from .version import FORMAT_MAJOR, FORMAT_MINOR

HEADER_SIZE = struct.calcsize(HEADER_FORMAT)
TRAILER_SIZE = struct.calcsize(TRAILER_FORMAT)
INDEX_DTYPE = np.dtype([("offset", "<u8"), ("bytes", "<u4"), ("positions", "<u4"), ("key", "V8"), ("xxh3", "<u8")])
TABLE_LEVEL = 9


def check_head(data: bytes) -> tuple[int, int]:
    """Return the minor version and the required features that the first bytes of a shard state.

    Raises:
        NotAShard, UnsupportedVersion, UnsupportedFeature: by clause of SPEC 3.
    """
    if len(data) < HEADER_SIZE or data[:4] != HEADER_MAGIC:
        raise NotAShard(f"does not begin with {HEADER_MAGIC!r} and a head of {HEADER_SIZE} bytes (SPEC 3.1)")
    _, major, minor, features, reserved = struct.unpack(HEADER_FORMAT, data)
    _check_version(major, features)
    if reserved:
        raise NotAShard("the reserved bytes of the head are not zero (SPEC 3.4)")
    return minor, features


def _check_version(major: int, features: int) -> None:
    if major != FORMAT_MAJOR:
        raise UnsupportedVersion(f"format {major}.x is not {FORMAT_MAJOR}.x, which is read here (SPEC 3.2)")
    if unknown := features & ~KNOWN_FEATURES:
        raise UnsupportedFeature(f"required features {unknown:#x} are not known to this reader (SPEC 3.3)")


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last bytes of a shard; the footer begins at `offset`."""

    offset: int
    metadata_bytes: int
    table_bytes: int
    sequences: int
    positions: int
    checksum: int
    features: int

    @property
    def footer_bytes(self) -> int:
        """Size of metadata, table and index together."""
        return self.metadata_bytes + self.table_bytes + self.sequences * INDEX_DTYPE.itemsize

    @classmethod
    def from_bytes(cls, data: bytes, file_size: int, head: tuple[int, int] | None) -> Trailer:
        """Read the trailer of a file of `file_size` bytes whose head states (minor, features); None: it was not read.

        Raises:
            NotAShard, TruncatedShard, UnsupportedVersion, CorruptFooter, LimitExceeded: by clause of SPEC 8.
        """
        if len(data) < TRAILER_SIZE or data[-4:] != TRAILER_MAGIC:
            raise NotAShard(f"does not end with {TRAILER_MAGIC!r}: cut off or not a shard (SPEC 8.1)")
        (
            offset,
            metadata_bytes,
            table_bytes,
            sequences,
            positions,
            checksum,
            size,
            features,
            major,
            minor,
            reserved,
            _,
        ) = struct.unpack(TRAILER_FORMAT, data)
        if head is None:
            _check_version(major, features)
            head = minor, features
        if size != file_size:
            raise TruncatedShard(f"the trailer says {size} bytes, the file has {file_size} (SPEC 8.2)")
        if (major, (minor, features), reserved) != (FORMAT_MAJOR, head, 0):
            raise CorruptFooter("the trailer states another version or other features than the head (SPEC 8.3)")
        trailer = cls(offset, metadata_bytes, table_bytes, sequences, positions, checksum, features)
        if not 1 <= trailer.sequences <= MAX_SEQUENCES:
            raise LimitExceeded(f"{trailer.sequences} sequences; allowed are 1 to {MAX_SEQUENCES} (SPEC 8.4)")
        if trailer.metadata_bytes > MAX_METADATA_BYTES:
            raise LimitExceeded(
                f"metadata of {trailer.metadata_bytes} bytes; the limit is {MAX_METADATA_BYTES} (SPEC 8.4)"
            )
        if trailer.offset < HEADER_SIZE or trailer.offset + trailer.footer_bytes + TRAILER_SIZE != size:
            raise CorruptFooter("metadata, table and index do not fill the footer (SPEC 8.5)")
        return trailer


@dataclass(frozen=True, slots=True)
class Footer:
    """Metadata, remap table and index of a shard."""

    metadata: ShardMetadata
    table: RemapTable | None
    index: npt.NDArray[np.void]

    def to_bytes(self, offset: int, features: int) -> bytes:
        """Return footer and trailer, to be written at `offset`."""
        metadata, index = self.metadata.to_bytes(), self.index.tobytes()
        table = b""
        if self.table is not None:
            table = zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(self.table.classes.tobytes())
        footer = metadata + table + index
        return footer + struct.pack(
            TRAILER_FORMAT,
            offset,
            len(metadata),
            len(table),
            len(self.index),
            int(self.index["positions"].sum()),
            xxhash.xxh3_64_intdigest(footer),
            offset + len(footer) + TRAILER_SIZE,
            features,
            FORMAT_MAJOR,
            FORMAT_MINOR,
            0,
            TRAILER_MAGIC,
        )

    @classmethod
    def from_bytes(cls, data: bytes, trailer: Trailer) -> Footer:
        """Read a footer.

        Raises:
            CorruptFooter: the subclass of what is wrong with it.
            LimitExceeded: a count is above its limit (SPEC 9).
        """
        if xxhash.xxh3_64_intdigest(data) != trailer.checksum:
            raise CorruptFooter("the footer does not match its checksum (SPEC 8.5)")
        ends = trailer.metadata_bytes, trailer.metadata_bytes + trailer.table_bytes
        metadata = ShardMetadata.from_bytes(data[: ends[0]])
        table = _read_table(data[ends[0] : ends[1]], metadata.fingerprint.vocab_size, trailer.features)
        index = np.frombuffer(data[ends[1] :], dtype=INDEX_DTYPE)
        _check_index(index, trailer)
        return cls(metadata, table, index)


def _read_table(data: bytes, vocab_size: int, features: int) -> RemapTable | None:
    if not features & FEATURE_REMAP:
        if data:
            raise CorruptTable("a table stands in a shard whose features name none (SPEC 5.1)")
        return None
    # an empty stream would stand for zeros, as in a frame
    if not data:
        raise CorruptTable("the features name a table and there is none (SPEC 5.1)")
    try:
        classes = PlaneDecoder().decode([data], vocab_size, np.uint8)
    except CorruptFrame as error:
        raise CorruptTable(f"the table is not one zstd frame of {vocab_size} bytes (SPEC 5.1)") from error
    return RemapTable(classes.view(np.uint8))


def _check_index(index: npt.NDArray[np.void], trailer: Trailer) -> None:
    ends = index["offset"] + index["bytes"]
    tiled = int(index["offset"][0]) == HEADER_SIZE and int(ends[-1]) == trailer.offset
    if not tiled or (index["offset"][1:] != ends[:-1]).any():
        raise CorruptIndex("the frames do not tile the space between head and footer (SPEC 7.2)")
    if int(index["positions"].min()) < 2 or int(index["positions"].max()) > MAX_SEQUENCE_POSITIONS:
        raise LimitExceeded(f"a sequence must have 2 to {MAX_SEQUENCE_POSITIONS} tokens (SPEC 9)")
    if int(index["positions"].sum()) != trailer.positions:
        raise CorruptIndex("the positions of the index do not add up to the trailer's (SPEC 7.2)")
