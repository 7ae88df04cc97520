"""A fuzz target: whatever the bytes are, both readers refuse them with their own errors, or read the same.

    pip install atheris
    python tests/fuzz_shard.py tests/corpus/shard -max_len=8192 -timeout=20 -rss_limit_mb=2048

atheris has no wheels for every Python, so it is no part of the `dev` extra; `test_format_fuzz.py` replays the corpus
without it. What an input stands for is said in `shard_orders.py`.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import spec_decoder
from shard_orders import shard_of
from test_format_conformance import plain

from teachercache.format_spec import Shard, ShardError

# The second decoder is slow: larger shards are opened, and no more.
MAX_ENTRIES = 20_000


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
