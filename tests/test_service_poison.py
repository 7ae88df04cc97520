"""A sequence that the teacher cannot score is found, recorded and left out; the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_engine import Bench, FakeEngine, newest

from teachercache.format_spec import Shard
from teachercache.service.engines import EngineDied, EngineError
from teachercache.service.meta import MAX_ATTEMPTS

SEQUENCES = 6


class PoisonedEngine(FakeEngine):
    """An engine that cannot score some sequences."""

    def __init__(self, poison: list[list[int]], error: Callable[[], Exception]) -> None:
        super().__init__()
        self.poison, self.error = poison, error

    def score(self, sequences, **how):  # type: ignore[no-untyped-def]
        for ids in sequences:
            if ids.tolist() in self.poison:
                raise self.error()
        yield from super().score(sequences, **how)


def work(bench: Bench, poison: list[int], error: Callable[[], Exception]) -> PoisonedEngine:
    """Score a data set whose sequences of these numbers are poison."""
    random = np.random.default_rng(1)
    ids = [random.integers(0, 50, 8).tolist() for _ in range(SEQUENCES)]
    engine = PoisonedEngine([ids[number] for number in poison], error)
    bench.submit()
    worker = bench.worker(engine)
    while worker.step():
        pass
    return engine


@pytest.mark.parametrize(
    "error", [lambda: RuntimeError("out of memory"), lambda: EngineDied("killed"), lambda: EngineError("no rows")]
)
def test_one_bad_sequence_costs_its_own_rows(tmp_path: Path, error: Callable[[], Exception]) -> None:
    bench = Bench(tmp_path, SEQUENCES, shard_positions=24)
    work(bench, [4], error)
    row, manifest = bench.row(), newest(bench)
    assert row.state == "complete" and manifest.complete
    assert [(item.sequence, str(error()) in item.error) for item in row.skipped] == [(4, True)]
    assert manifest.quality.absent_rows == 7
    scored = [s for d in manifest.shards for s in Shard(bench.store.checked_path(d.digest).read_bytes())]
    assert [bool(item.rows.absent_P.all()) for item in scored] == [False] * 4 + [True, False]
    assert not any(item.rows.absent_P.any() for number, item in enumerate(scored) if number != 4)


def test_a_bad_sequence_in_each_range_is_left_out(tmp_path: Path) -> None:
    bench = Bench(tmp_path, SEQUENCES, shard_positions=24)
    work(bench, [0, 5], lambda: EngineError("no rows"))
    assert [item.sequence for item in bench.row().skipped] == [0, 5]


def test_a_teacher_that_fails_at_everything_fails_the_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path, SEQUENCES, shard_positions=24)
    engine = work(bench, [0, 1, 2, 3, 4, 5], lambda: EngineError("no rows"))
    row = bench.row()
    assert row.state == "failed" and row.failure is not None
    assert "2 of sequences 0 to 2 fail, each alone; the last with: no rows" in row.failure.detail
    # a retry begins anew, and finds a teacher that works
    engine.poison = []
    bench.meta.retry(row.id)
    worker = bench.worker(engine)
    while worker.step():
        pass
    row = bench.row()
    assert row.state == "complete" and row.skipped == () and newest(bench).quality.absent_rows == 0


def test_trouble_that_passes_costs_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, SEQUENCES, shard_positions=24)
    failures = iter(range(MAX_ATTEMPTS + 2))

    def fail_for_a_while() -> None:
        if next(failures, None) is not None:
            raise RuntimeError("memory is taken")

    bench.submit()
    worker = bench.worker(FakeEngine(before_row=fail_for_a_while))
    while worker.step():
        pass
    assert bench.row().state == "complete" and bench.row().skipped == ()
