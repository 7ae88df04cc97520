"""A data set that extends an earlier one costs what is new of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCAB_SIZE, Bench, FakeEngine, newest

from teachercache.format_spec import CacheRequest, Example, Manifest, Shard
from teachercache.service.meta import Range, RequestRow, shard_key
from teachercache.service.plan import content_of


def examples(count: int, seed: int = 1) -> list[Example]:
    random = np.random.default_rng(seed)
    return [Example(input_ids=random.integers(0, VOCAB_SIZE, 8)) for _ in range(count)]


def ask(bench: Bench, data: list[Example], engine: FakeEngine, **settings: Any) -> tuple[RequestRow, Manifest]:
    """Have a data set scored, and return the request and its manifest."""
    bench.spec = bench.request_for(bench.upload(data), **({"shard_positions": 16} | settings))
    bench.submit()
    worker = bench.worker(engine)
    while worker.step():
        pass
    row = bench.row()
    assert row.state == "complete"
    return row, newest(bench)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_shards_of_the_old_part_are_taken(bench: Bench) -> None:
    engine = FakeEngine()
    data = examples(9)
    first, before = ask(bench, data[:6], engine)
    assert first.positions_reused == 0
    scored = sum(engine.scored)
    row, after = ask(bench, data, engine)
    assert row.id != first.id and row.positions_reused == 48 and row.tokens_scored == 3 * 8
    assert [shard.digest for shard in after.shards[:3]] == [shard.digest for shard in before.shards]
    # two new shards, none of them the first, which is audited
    assert sum(engine.scored) == scored + 3 * 8
    assert [shard.first for shard in after.shards] == [0, 2, 4, 6, 8]
    ids = [s.input_ids_L.tolist() for d in after.shards for s in Shard(bench.store.checked_path(d.digest).read_bytes())]
    assert ids == [example.input_ids.tolist() for example in data]


def test_a_part_that_moved_is_taken_too_and_all_of_it_needs_no_teacher(bench: Bench) -> None:
    data = examples(8)
    ask(bench, data, FakeEngine())

    def fail(*args: object, **options: object) -> FakeEngine:
        raise AssertionError("the teacher is not needed")

    bench.spec = bench.request_for(bench.upload(data[4:]), shard_positions=16)
    bench.submit()
    worker = bench.worker(FakeEngine())
    worker._load = fail
    while worker.step():
        pass
    row = bench.row()
    assert (row.state, row.positions_reused, row.tokens_scored) == ("complete", 32, 0)
    assert [shard.first for shard in newest(bench).shards] == [0, 2]


@pytest.mark.parametrize("settings", [{"seed": 5}, {"min_prob": "0.1"}, {"profile": "fp16"}])
def test_other_settings_share_nothing(bench: Bench, settings: dict[str, Any]) -> None:
    data = examples(4)
    ask(bench, data, FakeEngine())
    row, _ = ask(bench, data, FakeEngine(), **settings)
    assert row.positions_reused == 0 and row.tokens_scored == 32


def test_a_teacher_that_changed_makes_them_again(bench: Bench) -> None:
    data = examples(6)
    ask(bench, data[:4], FakeEngine())
    row, manifest = ask(bench, data, FakeEngine(version="2"))
    assert manifest.fingerprint.software == {"fake": "2"}
    assert row.positions_reused == 0 and row.tokens_scored == 48


def test_damage_is_mended_in_both(bench: Bench) -> None:
    data = examples(6)
    ask(bench, data[:4], FakeEngine())
    row, manifest = ask(bench, data, FakeEngine())
    assert row.positions_reused == 32
    bench.store.quarantine(manifest.shards[0].digest)
    bench.meta.damaged(manifest.shards[0].digest, bench.store.put)
    assert bench.row().state == "failed"
    bench.meta.retry(row.id)
    worker = bench.worker(FakeEngine())
    while worker.step():
        pass
    mended = bench.row()
    assert (mended.state, mended.positions_reused) == ("complete", 16)
    assert newest(bench).shards == manifest.shards


def test_masks_and_lengths_are_part_of_the_content() -> None:
    mask = np.array([True, False])
    parts = [
        [Example(input_ids=np.array([1, 2, 3]))],
        [Example(input_ids=np.array([1, 2])), Example(input_ids=np.array([3]))],
        [Example(input_ids=np.array([1, 2]), loss_mask=mask)],
        [Example(input_ids=np.array([1, 2]), loss_mask=~mask)],
        [Example(input_ids=np.array([1, 2]))],
    ]
    assert len({content_of(part) for part in parts}) == len(parts)


def test_completions_belong_to_their_place(bench: Bench) -> None:
    scored = bench.spec
    generated = CacheRequest.from_json(
        scored.to_json() | {"generate": {"max_tokens": 4, "temperature": "1", "top_p": "1"}}
    )
    here, there = (Range(first, 2, 16, "sha256:" + "0" * 64) for first in (0, 2))
    assert shard_key(scored, here) == shard_key(scored, there)
    assert shard_key(generated, here) != shard_key(generated, there)
