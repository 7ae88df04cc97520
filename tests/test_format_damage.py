"""Damage to a large shard, lies about where things are, and declared sizes that nobody should believe."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from format_samples import sequence, shard_bytes
from shard_parts import ENTRY_SIZE, HEAD_SIZE, TRAILER_SIZE, Parts, resealed, unzstd

from teachercache.format_spec import (
    CorruptFooter,
    CorruptFrame,
    CorruptIndex,
    LimitExceeded,
    NotAShard,
    Shard,
    ShardError,
    TruncatedShard,
)

SHAPES = {"top 100": (100, 0), "top 16 and 16 tail samples": (16, 16)}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def large(request: pytest.FixtureRequest) -> bytes:
    """A shard of 36,000 rows, every text three times: 4.7 MB of 100 entries, or 2.1 MB of 16 and 16 tail samples."""
    k, tail_samples = request.param
    items = [sequence(seed, 121, k=k, tail_samples=tail_samples, absent=0.01) for seed in range(100)]
    return shard_bytes(*items, *items, *items)


def owners(data: bytes, places: npt.NDArray[np.int64]) -> list[int]:
    """The sequences that bytes belong to, 0 for those of head and footer."""
    index = Shard(data).index
    numbers: list[int] = (np.searchsorted(index["offset"] + index["bytes"], places, side="right") % len(index)).tolist()
    return numbers


@pytest.mark.parametrize("flips", [2_500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_a_large_shard_is_accepted(large: bytes, flips: int, tmp_path: Path) -> None:
    """Opening it and reading the sequence that the bit belongs to, or any, must not go well."""
    path = tmp_path / "large.tkc"
    path.write_bytes(large)
    rng, accepted = np.random.default_rng(flips), []
    places, bits = rng.integers(len(large), size=flips), rng.integers(8, size=flips)
    fd = os.open(path, os.O_RDWR)
    for offset, bit, number in zip(places.tolist(), bits.tolist(), owners(large, places), strict=True):
        os.pwrite(fd, bytes([large[offset] ^ 1 << bit]), offset)
        try:
            with Shard.open(path) as shard:
                shard.read(number)
            accepted.append((offset, bit))
        except ShardError:
            os.pwrite(fd, large[offset : offset + 1], offset)
    os.close(fd)
    assert accepted == []
    with Shard.open(path) as shard:
        assert shard.num_sequences == sum(1 for _ in shard)


def test_a_cut_shard_is_refused_wherever_it_is_cut(large: bytes) -> None:
    for size in np.random.default_rng(1).integers(len(large), size=1000).tolist():
        with pytest.raises((NotAShard, TruncatedShard)):
            Shard(large[:size])


def test_runs_of_damage_are_refused(large: bytes) -> None:
    """As disks lose them: whole sectors, from anywhere on."""
    rng = np.random.default_rng(2)
    places = rng.integers(len(large), size=400)
    for at, number in zip(places.tolist(), owners(large, places), strict=True):
        end = min(at + int(rng.choice([1, 8, 512, 4096])), len(large))
        run = bytes(byte ^ 0xFF for byte in large[at:end])
        with pytest.raises(ShardError):
            Shard(large[:at] + run + large[end:]).read(number)


def small() -> Parts:
    return Parts.of(shard_bytes(*(sequence(seed, 9, tail_samples=2) for seed in range(3))))


def test_frames_that_change_places_are_refused() -> None:
    parts = small()
    bodies = [frame.body for frame in reversed(parts.frames)]
    data, begin = parts.build(), HEAD_SIZE
    end = begin + sum(map(len, bodies))
    with pytest.raises(CorruptFrame, match=r"does not match its checksum \(SPEC 7\.3\)"):
        Shard(data[:begin] + b"".join(bodies) + data[end:]).verify()
    frames = zip(parts.frames, bodies, strict=True)
    shard = Shard(replace(parts, frames=tuple(replace(frame, body=body) for frame, body in frames)).build())
    assert len(shard.read(1)) == 9
    for number in (0, 2):
        with pytest.raises(CorruptFrame, match=r"other tokens than the index says \(SPEC 7\.2\)"):
            shard.read(number)


def test_entries_that_change_places_are_refused() -> None:
    data = small().build()
    begin, end = len(data) - TRAILER_SIZE - 3 * ENTRY_SIZE, len(data) - TRAILER_SIZE
    entries = [data[at : at + ENTRY_SIZE] for at in range(begin, end, ENTRY_SIZE)]
    with pytest.raises(CorruptIndex, match=r"do not tile"):
        Shard(resealed(data[:begin] + b"".join(reversed(entries)) + data[end:]))


BODY = len(small().frames[0].body)
LIES = [
    ("two entries at one place", small().with_entry(1, offset=16), CorruptIndex, "7.2"),
    ("frames that overlap", small().with_entry(1, offset=16 + BODY - 1), CorruptIndex, "7.2"),
    ("a gap", small().with_entry(1, offset=16 + BODY + 1), CorruptIndex, "7.2"),
    ("a step back", small().with_entry(2, offset=0), CorruptIndex, "7.2"),
    ("out of the file", small().with_entry(2, offset=2**40), CorruptIndex, "7.2"),
    ("an offset that wraps around", small().with_entry(2, offset=2**64 - 1), CorruptIndex, "7.2"),
    ("a frame of no bytes", small().with_entry(0, length=0), CorruptIndex, "7.2"),
    ("a frame larger than the file", small().with_entry(2, length=2**32 - 1), CorruptIndex, "7.2"),
    ("no positions", small().with_entry(0, positions=0), LimitExceeded, "9"),
    ("one position", small().with_entry(0, positions=1), LimitExceeded, "9"),
    ("four billion positions", small().with_entry(0, positions=2**32 - 1), LimitExceeded, "9"),
    ("a position that the frame has not", small().with_entry(0, positions=10), CorruptFrame, "4.1"),
    ("another key", small().with_entry(1, key=bytes(8)), CorruptFrame, "7.2"),
    ("no sequence", small().with_trailer(sequences=0), LimitExceeded, "8.4"),
    ("fewer sequences", small().with_trailer(sequences=2), CorruptFooter, "8.5"),
    ("more sequences", small().with_trailer(sequences=4), CorruptFooter, "8.5"),
    ("2^63 sequences", small().with_trailer(sequences=2**63), LimitExceeded, "8.4"),
    ("other positions in sum", small().with_trailer(positions=26), CorruptIndex, "7.2"),
    ("the footer before the head", small().with_trailer(footer=3), CorruptFooter, "8.5"),
    ("the footer behind the end", small().with_trailer(footer=2**50), CorruptFooter, "8.5"),
    ("metadata of 4 GiB", small().with_trailer(metadata_length=2**32 - 1), LimitExceeded, "8.4"),
    ("a table of 4 GiB", small().with_trailer(table_length=2**32 - 1), CorruptFooter, "8.5"),
    ("another size", small().with_trailer(size=10), TruncatedShard, "8.2"),
]


@pytest.mark.parametrize(("parts", "error", "clause"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_lies_under_right_checksums(parts: Parts, error: type[ShardError], clause: str) -> None:
    with pytest.raises(ShardError, match=re.escape(f"(SPEC {clause})")) as caught:
        Shard(parts.build()).verify()
    assert type(caught.value) is error


def test_bytes_behind_the_end_or_between_the_parts_are_refused() -> None:
    data = small().build()
    for at in (16, len(data) - 64, len(data)):
        with pytest.raises(ShardError):
            Shard(data[:at] + bytes(8) + data[at:])


def stored(content: bytes, window_log: int) -> bytes:
    """A zstd frame that holds this content as it is, and asks for a window of 2 to this power."""
    head = struct.pack("<IBBI", 0xFD2FB528, 0x80, window_log - 10 << 3, len(content))
    return head + (len(content) << 3 | 1).to_bytes(3, "little") + content


def test_a_window_is_at_most_8_mib_however_little_it_holds() -> None:
    parts = small()
    plane = unzstd(parts.frames[0].streams[0])
    expected = Shard(parts.build()).read(0).input_ids_L
    allowed = parts.with_stream("input_ids", stored(plane, 23)).build()
    np.testing.assert_array_equal(Shard(allowed).read(0).input_ids_L, expected)
    for window_log in (24, 31):
        with pytest.raises(CorruptFrame, match=r"needs a window of \d+ bytes \(SPEC 9\)"):
            Shard(parts.with_stream("input_ids", stored(plane, window_log)).build()).read(0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space that holds")
def test_declared_sizes_take_no_memory() -> None:
    """Small shards that would be large ones, read within 8 MiB of address space beyond what was there before."""
    script = Path(__file__).with_name("shard_bombs.py")
    command = [sys.executable, str(script), str(8 << 20)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert result.stdout.splitlines() == ["21 refused"], result.stdout + result.stderr
