"""A shard taken apart, to be put together again with one thing wrong and every checksum right.

Layout from `format_spec/SPEC.md`; it trusts what it takes apart and checks nothing that it puts together.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
import zstandard

HEAD = "<4sHHII"
HEAD_FIELDS = ("magic", "major", "minor", "features", "reserved")
ENTRY = "<QII8sQ"
ENTRY_FIELDS = ("offset", "length", "positions", "key", "checksum")
TRAILER = "<QIIQQQQIHHI4s"
TRAILER_FIELDS = (
    *("footer", "metadata_length", "table_length", "sequences", "positions", "checksum", "size"),
    *("features", "major", "minor", "reserved", "magic"),
)
HEAD_SIZE, TRAILER_SIZE, ENTRY_SIZE = struct.calcsize(HEAD), struct.calcsize(TRAILER), struct.calcsize(ENTRY)
Fields = Mapping[str, int | bytes]


@dataclass(frozen=True)
class Frame:
    """What the index says of a frame, and its bytes; `stated` are fields of its entry that lie."""

    body: bytes
    positions: int
    key: bytes
    stated: Fields

    @property
    def streams(self) -> list[bytes]:
        """The compressed planes."""
        _, count, _ = struct.unpack_from("<IHH", self.body)
        lengths, end, streams = struct.unpack_from(f"<{count}I", self.body, 8), 8 + 4 * count, []
        for length in lengths:
            streams.append(self.body[end : end + length])
            end += length
        return streams

    def with_streams(self, streams: Sequence[bytes]) -> Frame:
        """The frame of these planes."""
        lengths = struct.pack(f"<{len(streams)}I", *map(len, streams))
        head = struct.pack("<IHH", self.positions, len(streams), 0)
        return replace(self, body=head + lengths + b"".join(streams))


@dataclass(frozen=True)
class Parts:
    """A shard in pieces; `head` and `trailer` are fields of these two that are not what they should be."""

    metadata: bytes
    table: bytes
    frames: tuple[Frame, ...]
    head: Fields
    trailer: Fields

    @classmethod
    def of(cls, data: bytes) -> Parts:
        """The parts of a valid shard."""
        head = dict(zip(HEAD_FIELDS, struct.unpack_from(HEAD, data), strict=True))
        trailer = dict(zip(TRAILER_FIELDS, struct.unpack(TRAILER, data[-TRAILER_SIZE:]), strict=True))
        metadata_end = trailer["footer"] + trailer["metadata_length"]
        table_end = metadata_end + trailer["table_length"]
        frames = tuple(
            Frame(data[offset : offset + length], positions, key, {})
            for offset, length, positions, key, _ in struct.iter_unpack(ENTRY, data[table_end:-TRAILER_SIZE])
        )
        shared = {name: head[name] for name in ("major", "minor", "features")}
        return cls(data[trailer["footer"] : metadata_end], data[metadata_end:table_end], frames, shared, shared)

    def build(self) -> bytes:
        """The shard, with checksums that match."""
        entries, offset = b"", HEAD_SIZE
        for frame in self.frames:
            checksum = xxhash.xxh3_64_intdigest(frame.body)
            values = (offset, len(frame.body), frame.positions, frame.key, checksum)
            entry = dict(zip(ENTRY_FIELDS, values, strict=True)) | dict(frame.stated)
            entries += struct.pack(ENTRY, *(entry[name] for name in ENTRY_FIELDS))
            offset += len(frame.body)
        footer = self.metadata + self.table + entries
        trailer: dict[str, int | bytes] = {
            "footer": offset,
            "metadata_length": len(self.metadata),
            "table_length": len(self.table),
            "sequences": len(self.frames),
            "positions": sum(int(frame.stated.get("positions", frame.positions)) for frame in self.frames),
            "checksum": xxhash.xxh3_64_intdigest(footer),
            "size": offset + len(footer) + TRAILER_SIZE,
            "reserved": 0,
            "magic": b"TKCE",
        }
        trailer |= self.trailer
        head = {"magic": b"TKCS", "reserved": 0} | dict(self.head)
        frames = b"".join(frame.body for frame in self.frames)
        ends = struct.pack(TRAILER, *(trailer[name] for name in TRAILER_FIELDS))
        return struct.pack(HEAD, *(head[name] for name in HEAD_FIELDS)) + frames + footer + ends

    @property
    def fields(self) -> dict[str, Any]:
        """The metadata, decoded."""
        fields: dict[str, Any] = json.loads(self.metadata)
        return fields

    def with_fields(self, **changes: Any) -> Parts:
        """Change keys of the metadata; None removes one."""
        fields = {name: value for name, value in (self.fields | changes).items() if value is not None}
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        return replace(self, metadata=text.encode())

    def with_column(self, name: str, **changes: Any) -> Parts:
        """Change keys of one column's object in the metadata."""
        columns = [column | changes if column["name"] == name else column for column in self.fields["columns"]]
        return self.with_fields(columns=columns)

    def with_head(self, **fields: int | bytes) -> Parts:
        """Let the head state these."""
        return replace(self, head={**self.head, **fields})

    def with_trailer(self, **fields: int | bytes) -> Parts:
        """Let the trailer state these."""
        return replace(self, trailer={**self.trailer, **fields})

    def with_ends(self, **fields: int) -> Parts:
        """Let head and trailer state these."""
        return self.with_head(**fields).with_trailer(**fields)

    def with_frame(self, frame: Frame, number: int = 0) -> Parts:
        """Take this for a frame."""
        return replace(self, frames=(*self.frames[:number], frame, *self.frames[number + 1 :]))

    def with_body(self, body: bytes, number: int = 0) -> Parts:
        """Take these bytes for a frame."""
        return self.with_frame(replace(self.frames[number], body=body), number)

    def with_entry(self, number: int = 0, **stated: int | bytes) -> Parts:
        """Let an entry of the index state these."""
        return self.with_frame(replace(self.frames[number], stated=stated), number)

    def with_stream(self, name: str, stream: bytes, number: int = 0, plane: int = 0) -> Parts:
        """Take this for a plane of a column, the lowest if not said."""
        streams = self.frames[number].streams
        streams[self._planes(name).start + plane] = stream
        return self.with_frame(self.frames[number].with_streams(streams), number)

    def integers(self, name: str, number: int = 0) -> list[int]:
        """The stored integers of a column whose planes are not all empty."""
        planes = [unzstd(stream) for stream in self.frames[number].streams[self._planes(name)]]
        size = max(map(len, planes))
        return [int.from_bytes(digits, "little") for digits in zip(*(p or bytes(size) for p in planes), strict=True)]

    def with_integers(self, name: str, integers: Sequence[int], number: int = 0) -> Parts:
        """Store these integers in a column."""
        where, streams = self._planes(name), self.frames[number].streams
        planes = (bytes(value >> 8 * plane & 0xFF for value in integers) for plane in range(where.stop - where.start))
        streams[where] = [zstandard.compress(plane) if any(plane) else b"" for plane in planes]
        return self.with_frame(self.frames[number].with_streams(streams), number)

    def with_integer(self, name: str, place: int, value: int, number: int = 0) -> Parts:
        """Store this integer at one place of a column."""
        integers = self.integers(name, number)
        integers[place] = value
        return self.with_integers(name, integers, number)

    def _planes(self, name: str) -> slice:
        begin = 0
        for column in self.fields["columns"]:
            if column["name"] == name:
                return slice(begin, begin + column["planes"])
            begin += column["planes"]
        raise KeyError(name)


def unzstd(stream: bytes) -> bytes:
    return zstandard.decompress(stream) if stream else b""


def resealed(data: bytes) -> bytes:
    """The same bytes with the checksums and the size that would be right, as far as the trailer can be followed."""
    if len(data) < HEAD_SIZE + TRAILER_SIZE:
        return data
    shard, end = bytearray(data), len(data) - TRAILER_SIZE
    trailer = dict(zip(TRAILER_FIELDS, struct.unpack_from(TRAILER, data, end), strict=True))
    begin = trailer["footer"] + trailer["metadata_length"] + trailer["table_length"]
    for entry in range(begin, end - ENTRY_SIZE + 1, ENTRY_SIZE):
        offset, length = struct.unpack_from("<QI", data, entry)
        struct.pack_into("<Q", shard, entry + 24, xxhash.xxh3_64_intdigest(data[offset : offset + length]))
    checksum = xxhash.xxh3_64_intdigest(bytes(shard[trailer["footer"] : end]))
    struct.pack_into("<QQ", shard, end + 32, checksum, len(data))
    return bytes(shard)
