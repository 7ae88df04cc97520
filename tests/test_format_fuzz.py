"""The corpus that the fuzzer of `fuzz_shard.py` kept, replayed without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_shard import check
from shard_orders import ORDERED, shard_of

from teachercache.format_spec import Shard, ShardError

CORPUS = sorted((Path(__file__).parent / "corpus" / "shard").iterdir())


@pytest.mark.parametrize("part", range(8))
def test_no_input_of_the_corpus_is_read_differently_or_crashes(part: int) -> None:
    for path in CORPUS[part::8]:
        check(path.read_bytes())


def test_the_corpus_reaches_behind_the_checksums() -> None:
    """It holds shards that are read, and orders after which one is refused for many reasons."""
    reasons = set()
    for path in CORPUS:
        data = path.read_bytes()
        try:
            shard = Shard(shard_of(data))
            shard.verify()
        except ShardError as error:
            if data[:1] == bytes([ORDERED]):
                reasons.add(str(error).rpartition("(")[2])
        else:
            reasons.add("read")
    assert "read" in reasons
    assert len(reasons) >= 20


def test_orders_without_content_are_a_valid_shard() -> None:
    assert Shard(shard_of(bytes([ORDERED]))).num_sequences > 0
