"""Orders: a string of bytes that says how to change parts of a valid shard, for the fuzzer to make up.

The first byte of an input says what becomes of the others: a shard as it is (0), a shard whose checksums are made
right (1), or orders (2); a shard that they changed is sealed again, so that damage gets behind the checksums.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from format_samples import sequence, shard_bytes
from shard_parts import ENTRY_FIELDS, HEAD_FIELDS, TRAILER_FIELDS, Parts, resealed

VECTORS = Path(__file__).parents[1] / "format_spec" / "vectors" / "valid"
# ids, codes and floats at the edges of what is allowed: padding, infinities, and what is no number
EDGES = (0, 1, 0xFFFFFF, 299, 300, 999, 1000, 0x7F7F, 0x7F80, 0x7C00, 0x1FE0, 0xFF800000, 0x7F800000, 0x7FC00000)
VALUES = (None, True, -1, 0, 1, 4097, 2**24, 1.5, "", "sha256:", "fp16", "m5", "ids", "none", [], {}, [[]])
LARGE = 1 << 16
RAW, RESEALED, ORDERED = range(3)


class Orders:
    """Numbers and bytes from an input; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self._at += size
        return self._data[self._at - size : self._at].ljust(size, b"\0")

    def number(self, size: int = 1) -> int:
        """The next bytes as a number."""
        return int.from_bytes(self.take(size), "little")

    def below(self, limit: int) -> int:
        """A number below a limit, 0 for a limit of 0."""
        return self.number(2) % max(1, limit)

    def some(self) -> bytes:
        """Up to 255 bytes."""
        return self.take(self.number())


@cache
def bases() -> list[Parts]:
    """Valid shards to start from: the vectors, and some random ones."""
    shards = [path.read_bytes() for path in sorted(VECTORS.glob("*.tkc"))]
    for seed, profile in enumerate(("bf16", "fp16", "m5")):
        items = [sequence(seed, 6, vocab_size=300), sequence(seed + 9, 4, vocab_size=300)]
        shards.append(shard_bytes(*items, vocab_size=300, profile=profile, remap=seed != 1))
    return [Parts.of(shard) for shard in shards]


def edit(data: bytes, orders: Orders) -> bytes:
    """Overwrite, insert or remove some bytes."""
    at, kind = orders.below(len(data) + 1), orders.number() % 3
    if kind == 0:
        return data[:at] + orders.some() + data[at:]
    if kind == 1:
        return data[:at] + data[at + 1 + orders.number() :]
    new = orders.some()
    return data[:at] + new + data[at + len(new) :]


def edit_metadata(parts: Parts, orders: Orders) -> Parts:
    return replace(parts, metadata=edit(parts.metadata, orders))


def edit_table(parts: Parts, orders: Orders) -> Parts:
    if orders.number() % 2:
        return replace(parts, table=zstandard.compress(edit(unpacked(parts.table), orders)))
    return replace(parts, table=edit(parts.table, orders))


def edit_body(parts: Parts, orders: Orders) -> Parts:
    number = orders.below(len(parts.frames))
    return parts.with_body(edit(parts.frames[number].body, orders), number)


def edit_plane(parts: Parts, orders: Orders) -> Parts:
    """Change what a plane holds, and compress it again."""
    number = orders.below(len(parts.frames))
    frame = parts.frames[number]
    streams = frame.streams
    if not streams:
        return parts
    plane = orders.below(len(streams))
    content = edit(unpacked(streams[plane]), orders)
    streams[plane] = zstandard.compress(content) if orders.number() % 4 else content
    return parts.with_frame(frame.with_streams(streams), number)


def edit_entry(parts: Parts, orders: Orders) -> Parts:
    name = ENTRY_FIELDS[orders.below(len(ENTRY_FIELDS))]
    value = field(name, orders, parts, wide=("offset", "checksum"))
    return parts.with_entry(orders.below(len(parts.frames)), **{name: value})


def edit_trailer(parts: Parts, orders: Orders) -> Parts:
    name = TRAILER_FIELDS[orders.below(len(TRAILER_FIELDS))]
    wide = ("footer", "sequences", "positions", "checksum", "size")
    return parts.with_trailer(**{name: field(name, orders, parts, wide=wide)})


def edit_head(parts: Parts, orders: Orders) -> Parts:
    name = HEAD_FIELDS[orders.below(len(HEAD_FIELDS))]
    value = field(name, orders, parts, wide=())
    return (
        parts.with_ends(**{name: value}) if name in ("major", "minor", "features") else parts.with_head(**{name: value})
    )


def edit_frames(parts: Parts, orders: Orders) -> Parts:
    """Repeat, drop or swap frames."""
    frames, number, kind = list(parts.frames), orders.below(len(parts.frames)), orders.number() % 3
    if kind == 0:
        frames.insert(number, frames[number])
    elif kind == 1:
        del frames[number]
    else:
        frames[0], frames[number] = frames[number], frames[0]
    return replace(parts, frames=tuple(frames))


def edit_integers(parts: Parts, orders: Orders) -> Parts:
    """Change single integers of a column, and keep the key right."""
    number, columns = orders.below(len(parts.frames)), parts.fields["columns"]
    if any(stream and declared(stream) >= LARGE for stream in parts.frames[number].streams):
        return parts
    column = columns[orders.below(len(columns))]
    name, size = column["name"], due(parts, column["name"], number)
    if size > LARGE or column["planes"] > 256:
        return parts
    integers = parts.integers(name, number) or [0] * size
    for _ in range(1 + orders.number() % 3):
        place, kind = orders.below(len(integers)), orders.number() % 4
        near = integers[orders.below(len(integers))]
        values = orders.number(4), EDGES[orders.below(len(EDGES))], near, near + orders.number() - 128
        # differences fall by wrapping around
        integers[place] = values[kind] % 2**32
    parts = parts.with_integers(name, integers, number)
    if name != "input_ids":
        return parts
    codes, ids = parts.integers(name, number), ids_of(parts)
    known = [ids[code] if code < len(ids) else code for code in codes]
    key = hashlib.sha256(struct.pack(f"<{len(known)}I", *known)).digest()
    return parts.with_frame(replace(parts.frames[number], key=key[:8]), number)


def due(parts: Parts, name: str, number: int) -> int:
    """How many integers a column has."""
    width = {"token_ids": "k", "logprobs": "k", "tail_token_ids": "tail_samples"}.get(name)
    by_token = name in ("input_ids", "loss_mask", "segment_ids")
    return (parts.frames[number].positions - (not by_token)) * (parts.fields[width] if width else 1)


def ids_of(parts: Parts) -> list[int] | range:
    """The id of each code."""
    classes = unpacked(parts.table)
    return sorted(range(len(classes)), key=lambda i: (-classes[i], i)) if classes else range(2**24)


def edit_fields(parts: Parts, orders: Orders) -> Parts:
    """Give a key of the metadata another value, or take it out."""
    fields = parts.fields
    holders: list[dict[str, Any]] = [fields, fields["fingerprint"], *fields["columns"]]
    holder = holders[orders.below(len(holders))]
    key = sorted(holder)[orders.below(len(holder))]
    holder[key] = VALUES[orders.below(len(VALUES))] if orders.number() % 2 else orders.number(1 + orders.number() % 8)
    if orders.number() % 4 == 0:
        del holder[key]
    return replace(parts, metadata=canonical(fields))


def edit_columns(parts: Parts, orders: Orders) -> Parts:
    """Drop, move, repeat or add a column, with its planes in each frame."""
    fields, streams = parts.fields, [frame.streams for frame in parts.frames]
    columns, kind = fields["columns"], orders.number() % 4
    number, to = orders.below(len(columns)), orders.below(len(columns))
    begin = sum(column["planes"] for column in columns[:number])
    column, planes = columns[number], [own[begin : begin + columns[number]["planes"]] for own in streams]
    if kind in (0, 1):
        del columns[number]
        for own in streams:
            del own[begin : begin + column["planes"]]
    if kind == 3:
        column, planes = {"name": "later", "planes": 1, "transform": "new"}, [[orders.some()] for _ in streams]
    if kind:
        at = sum(other["planes"] for other in columns[:to])
        columns.insert(to, column)
        for own, mine in zip(streams, planes, strict=True):
            own[at:at] = mine
    frames = (frame.with_streams(own) for frame, own in zip(parts.frames, streams, strict=True))
    return replace(parts, metadata=canonical(fields), frames=tuple(frames))


def canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def field(name: str, orders: Orders, parts: Parts, wide: tuple[str, ...]) -> int | bytes:
    """A value that the field's type can hold: often a small one or one near a frame's."""
    if name in ("magic", "key"):
        return orders.take(4 if name == "magic" else 8)
    size = 8 if name in wide else 2 if name in ("major", "minor") or (name == "reserved" and wide) else 4
    near = len(parts.frames[0].body) if parts.frames else 0
    choice = orders.number() % 3
    value = orders.number(size) if choice == 0 else orders.number() if choice == 1 else near + orders.number() - 128
    return max(0, value) % 2 ** (8 * size)


EDITS: tuple[Callable[[Parts, Orders], Parts], ...] = (
    edit_plane, edit_metadata, edit_body, edit_table, edit_entry, edit_trailer, edit_head, edit_frames,
    edit_integers, edit_integers, edit_fields, edit_columns,
)  # fmt: skip


def declared(stream: bytes) -> int:
    """How much a stream says that it holds, 2^64 where it is none."""
    try:
        size: int = zstandard.get_frame_parameters(stream).content_size
    except zstandard.ZstdError:
        return 2**64
    return size


def unpacked(stream: bytes) -> bytes:
    """What a stream holds, or its own bytes where it is none, or too large."""
    try:
        return zstandard.decompress(stream) if declared(stream) < LARGE else stream
    except zstandard.ZstdError:
        return stream


def shard_of(data: bytes) -> bytes:
    """The shard that an input stands for."""
    mode, rest = data[:1], data[1:]
    if mode == bytes([RESEALED]):
        return resealed(rest)
    if mode != bytes([ORDERED]):
        return rest
    orders = Orders(rest)
    parts = bases()[orders.below(len(bases()))]
    for _ in range(4):
        if not orders:
            break
        try:
            parts = EDITS[orders.below(len(EDITS))](parts, orders)
        except (struct.error, IndexError, KeyError, TypeError, ValueError, zstandard.ZstdError):
            # an order that the parts no longer allow
            break
    try:
        return parts.build()
    except (struct.error, IndexError):
        return rest
