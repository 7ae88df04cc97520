"""A worker that dies before each single step on disk, once for every step that there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_engine import Bench, FakeEngine, newest


def test_no_crash_between_two_steps_on_disk_loses_or_invents_a_shard(tmp_path: Path) -> None:
    undisturbed = Bench(tmp_path / "undisturbed")
    undisturbed.submit()
    steps = count_disk_steps(undisturbed)
    expected = newest(undisturbed)
    # of each blob: fsync, rename, fsync of the folder; one token file, three shards, three manifests
    assert steps == 7 * 3
    for step in range(steps):
        bench = Bench(tmp_path / f"crash{step}")
        bench.submit()
        assert crash_at(bench, step) == 137
        bench.open()
        if bench.row().manifest is not None:
            for descriptor in newest(bench).shards:
                assert bench.store.checked_path(descriptor.digest).stat().st_size == descriptor.bytes
        bench.meta.release_owner(None, "the worker was killed")
        # the shard that is encoded and the one that is scored
        assert bench.store.sweep() <= 2
        bench.worker(FakeEngine()).run()
        assert bench.row().state == "complete" and newest(bench) == expected, f"after a crash at step {step}"


def count_disk_steps(bench: Bench) -> int:
    """Run a worker and return how many fsyncs and renames it made."""
    steps: list[None] = []
    with watched_disk(lambda: steps.append(None)):
        bench.worker(FakeEngine()).run()
    return len(steps)


def crash_at(bench: Bench, step: int) -> int:
    """Run a worker in a process that dies before its fsync or rename number `step`; return its exit code."""
    child = os.fork()
    if child == 0:
        left = iter(range(step))
        with watched_disk(lambda: None if next(left, None) is not None else os._exit(137)):
            bench.open()
            bench.worker(FakeEngine()).run()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def watched_disk(before: Callable[[], None]) -> Iterator[None]:
    """Call `before` ahead of each fsync and rename."""

    def watched(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            before()
            real(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "rename"):
            patch.setattr(os, name, watched(getattr(os, name)))
        yield
