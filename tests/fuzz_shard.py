"""A fuzz target: whatever the bytes are, both readers refuse them with their own errors, or read the same.

    pip install atheris
    python tests/fuzz_shard.py tests/corpus/shard -max_len=8192 -timeout=20 -rss_limit_mb=2048

atheris has no wheels for every Python, so it is no part of the `dev` extra; `test_format_fuzz.py` replays the corpus
without it. The first byte of an input says what becomes of the others: a shard as it is (0), a shard whose checksums
are made right (1), or orders to change parts of a valid shard, which is then sealed again (2), so that damage gets
behind the checksums.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import spec_decoder
import zstandard
from format_samples import sequence, shard_bytes
from shard_parts import ENTRY_FIELDS, HEAD_FIELDS, TRAILER_FIELDS, Parts, resealed
from test_format_conformance import plain

from teachercache.format_spec import Shard, ShardError

VECTORS = Path(__file__).parents[1] / "format_spec" / "vectors" / "valid"
# The second decoder is slow: larger shards are opened, and no more.
MAX_ENTRIES = 20_000
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
)  # fmt: skip


def unpacked(stream: bytes) -> bytes:
    """What a stream holds, or its own bytes where it is none, or too large."""
    try:
        size = zstandard.get_frame_parameters(stream).content_size
        return zstandard.decompress(stream) if size < 1 << 16 else stream
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
        except (struct.error, IndexError, KeyError, ValueError):
            # an order that the parts no longer allow
            break
    try:
        return parts.build()
    except (struct.error, IndexError):
        return rest


def check(data: bytes) -> None:
    """Read the shard of an input by every way; raises what must not happen."""
    shard_data = shard_of(data)
    try:
        shard = Shard(shard_data)
    except ShardError:
        refused_by_both(shard_data)
        read_by_ranges(shard_data)
        return
    if not is_small(shard):
        return
    read_partly(shard)
    try:
        shard.verify()
        found = [plain(item) for item in shard]
    except ShardError:
        refused_by_both(shard_data)
        return
    expected = spec_decoder.decode(shard_data).sequences
    assert found == expected, "the two readers read different things"
    read_otherwise(shard, shard_data)


def read_otherwise(shard: Shard, shard_data: bytes) -> None:
    """A column is the same whatever else is read (SPEC 4.10), and whether it comes from memory or by ranges."""
    ranged = Shard.ranged(len(shard_data), lambda offset, length: shard_data[offset : offset + length])
    for number in range(shard.num_sequences):
        columns = shard.read_columns(number)
        by_ranges, into = ranged.read_columns(number), {name: np.empty_like(columns[name]) for name in columns}
        shard.read_into(number, into)
        for name, column in columns.items():
            alone = shard.read_columns(number, [name])[name]
            for other in (alone, by_ranges[name], into[name]):
                np.testing.assert_array_equal(other, column)


def is_small(shard: Shard) -> bool:
    """Whether the second decoder reads it in a moment."""
    widest = max(shard.metadata.k, shard.metadata.tail_samples, 1)
    return shard.num_positions * widest <= MAX_ENTRIES and shard.num_sequences <= MAX_ENTRIES


def refused_by_both(shard_data: bytes) -> None:
    """What we refuse, the text refuses too."""
    try:
        spec_decoder.decode(shard_data)
    except spec_decoder.SpecError:
        return
    raise AssertionError("we refuse what the second decoder reads")


def read_by_ranges(shard_data: bytes) -> None:
    """The head may be what is wrong, and is left unread (SPEC 8.6): anything but our errors is a bug."""
    with contextlib.suppress(ShardError):
        shard = Shard.ranged(len(shard_data), lambda offset, length: shard_data[offset : offset + length])
        if is_small(shard):
            read_partly(shard)


def read_partly(shard: Shard) -> None:
    """What needs a part of a sequence only: damage elsewhere may go unseen, but nothing else may happen."""
    for number in range(shard.num_sequences):
        for column in shard.metadata.columns:
            with contextlib.suppress(ShardError):
                shard.read_columns(number, [column.name] if column.is_known else None)
    with contextlib.suppress(ShardError):
        shard.column_bytes()
    shard.find(bytes(8))


def main() -> None:
    """Run the fuzzer, with libFuzzer's arguments."""
    import atheris

    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
