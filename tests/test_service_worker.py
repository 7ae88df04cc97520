"""The worker's promises, with an engine that is told when to fail."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from fake_engine import MAX_LENGTH, VOCAB_SIZE, Bench, FakeEngine, fake_rows, newest

from teachercache.format_spec import Code, Example, Shard, ShardWriter
from teachercache.service.engines import EngineDied
from teachercache.service.errors import InsufficientStorage, LeaseLost
from teachercache.service.meta import MAX_ATTEMPTS, PLAN, Lease
from teachercache.service.store import Staging
from teachercache.service.worker import Worker, score_in_order


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A data directory with a data set and a request for it."""
    return Bench(tmp_path)


def test_shards_hold_the_engine_s_rows_in_the_order_of_the_data_set(bench: Bench) -> None:
    bench.submit()
    engine = FakeEngine()
    bench.worker(engine).run()
    row, manifest = bench.row(), newest(bench)
    assert row.state == "complete" and row.failure is None
    assert row.shards == row.shards_done == len(manifest.shards) == 3
    assert row.positions == row.positions_done == row.tokens_scored == 48
    # the first shard is audited, and small enough to be scored again as a whole
    assert sum(engine.scored) == 48 + 16
    assert (manifest.quality.audited_rows, manifest.quality.audit_max_kl) == (14, "0.000000000")
    assert manifest.complete and [shard.first for shard in manifest.shards] == [0, 2, 4]
    sequences = [s for d in manifest.shards for s in Shard(bench.store.checked_path(d.digest).read_bytes())]
    expected = np.random.default_rng(1)
    for sequence in sequences:
        ids = expected.integers(0, VOCAB_SIZE, 8)
        assert (sequence.input_ids_L == ids).all()
        assert (sequence.rows.token_ids_PK == fake_rows(ids, 4).token_ids_PK).all()


def test_rows_held_back_are_bounded_by_scoring_in_blocks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachercache.service.worker.BUFFER_BYTES", 44 * 20)
    engine = FakeEngine()
    examples = [Example(input_ids=np.arange(n)) for n in (4, 9, 9, 16, 2)]
    scored = list(score_in_order(engine, examples, bench.spec, lambda positions: None))
    assert [len(sequence) for sequence in scored] == [4, 9, 9, 16, 2]
    assert engine.scored == [9, 4, 9, 16, 2]


def test_an_engine_that_fails_gets_three_attempts(bench: Bench) -> None:
    bench.submit()
    calls = []

    def fail() -> None:
        calls.append(1)
        raise MemoryError("no room for the logits")

    bench.worker(FakeEngine(before_row=fail)).run()
    failure = bench.row().failure
    # as a range, and two of its sequences each alone
    assert len(calls) == 3 * MAX_ATTEMPTS
    assert failure is not None and failure.code is Code.INTERNAL
    assert "2 of sequences 0 to 1 fail, each alone" in failure.detail and "no room for the logits" in failure.detail
    assert bench.meta.retry(bench.spec.id).state == "queued"
    bench.worker(FakeEngine()).run()
    assert bench.row().state == "complete"


def test_a_teacher_that_cannot_be_loaded_fails_the_request_at_once(bench: Bench) -> None:
    from teachercache.service.worker import Worker

    bench.submit()
    Worker(bench.settings, bench.store, bench.meta, Event()).run()
    failure = bench.row().failure
    assert failure is not None and failure.code is Code.UNSUPPORTED_TEACHER
    assert str(bench.root / "teacher") in failure.detail


@pytest.mark.parametrize(
    ("ids", "code", "words"),
    [
        ([1, 2, VOCAB_SIZE], Code.TOKEN_OUT_OF_VOCABULARY, ["sequence 1", "50 at position 2", "(0 to 49)"]),
        ([1, -1], Code.TOKEN_OUT_OF_VOCABULARY, ["sequence 1", "-1 at position 1"]),
        ([1], Code.SEQUENCE_TOO_SHORT, ["sequence 1 has 1 tokens", "at least 2"]),
        ([], Code.SEQUENCE_TOO_SHORT, ["sequence 1 has 0 tokens"]),
        ([1] * (MAX_LENGTH + 1), Code.SEQUENCE_TOO_LONG, ["sequence 1 has 17 tokens", "limit of 16"]),
    ],
)
def test_a_bad_sequence_fails_the_request_before_the_teacher_runs(
    bench: Bench, ids: list[int], code: Code, words: list[str]
) -> None:
    data = bench.upload([Example(input_ids=np.array([1, 2])), Example(input_ids=np.array(ids, dtype=np.int64))])
    bench.spec = bench.request_for(data)
    bench.submit()
    engine = FakeEngine()
    bench.worker(engine).run()
    failure = bench.row().failure
    assert failure is not None and failure.code is code and all(word in failure.detail for word in words)
    assert engine.scored == [] and bench.row().shards is None


def test_other_files_under_the_teacher_s_name_are_another_teacher(bench: Bench) -> None:
    bench.submit()
    (bench.root / "teacher" / "model.safetensors").write_bytes(b"other weights")
    bench.worker(FakeEngine()).run()
    failure = bench.row().failure
    assert failure is not None and failure.code is Code.UNKNOWN_TEACHER


def test_an_engine_that_is_not_what_was_promised_is_refused(bench: Bench) -> None:
    bench.submit()
    bench.worker(FakeEngine(vocab_size=VOCAB_SIZE + 1)).run()
    failure = bench.row().failure
    assert failure is not None and failure.code is Code.UNSUPPORTED_TEACHER
    assert "vocab_size 51 here, and the request was made for 50" in failure.detail


def test_a_worker_that_is_told_to_end_gives_its_range_back(bench: Bench) -> None:
    bench.submit()
    stop = Event()
    engine = FakeEngine()
    engine.before_row = lambda: stop.set() if len(engine.scored) == 5 else None
    bench.worker(engine, stop).run()
    row = bench.row()
    assert (row.state, row.shards_done) == ("running", 1)
    lease = bench.meta.lease("another", 60)
    assert lease is not None and lease.number == 1
    bench.meta.release(lease)
    for _ in range(MAX_ATTEMPTS):
        stop = Event()
        engine = FakeEngine(before_row=stop.set)
        bench.worker(engine, stop).run()
    # to be interrupted is no failed attempt
    bench.worker(FakeEngine()).run()
    assert bench.row().state == "complete"


def test_a_worker_whose_lease_went_to_another_commits_nothing(bench: Bench) -> None:
    bench.submit()
    other = Bench.__new__(Bench)
    other.settings, other.spec = bench.settings, bench.spec
    other.open()
    taken: list[Lease] = []

    def take_over() -> None:
        if not taken and other.meta.release_owner(None, None):
            lease = other.meta.lease("another", 60)
            assert lease is not None
            taken.append(lease)

    engine = FakeEngine(before_row=take_over)
    worker = bench.worker(engine)
    assert worker.step() and worker.step()
    assert bench.row().shards_done == 0 and taken[0].number == 0
    other.meta.renew(taken[0], 60)


def test_software_that_changes_between_two_shards_makes_the_first_one_again(bench: Bench) -> None:
    bench.submit()
    first = bench.worker(FakeEngine(version="1"))
    assert first.step() and first.step()
    assert newest(bench).fingerprint.software == {"fake": "1"} and not newest(bench).complete
    bench.worker(FakeEngine(version="2")).run()
    row, manifest = bench.row(), newest(bench)
    assert row.state == "complete" and manifest.complete
    assert manifest.fingerprint.software == {"fake": "2"}
    assert row.tokens_scored == 48 + 16
    for descriptor in manifest.shards:
        shard = Shard(bench.store.checked_path(descriptor.digest).read_bytes())
        assert shard.metadata.fingerprint == manifest.fingerprint


def test_progress_is_recorded_while_a_range_is_scored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachercache.service.worker.PROGRESS_S", 0.0)
    bench.submit()
    seen = []
    engine = FakeEngine(before_row=lambda: seen.append((bench.row().positions_done, bench.row().tokens_scored)))
    bench.worker(engine).run()
    # the audit of the first shard counts for nothing
    assert seen == [(8 * i, 8 * i) for i in (0, 1, 2, 2, 2, 3, 4, 5)]


def test_progress_is_recorded_at_most_once_a_second(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.submit()
    renewals = []
    monkeypatch.setattr(bench.meta, "renew", lambda *args: renewals.append(args))
    begin = time.monotonic()
    bench.worker(FakeEngine()).run()
    # two around the loading of the engine
    assert len(renewals) <= 2 + (time.monotonic() - begin)


def test_a_full_disk_fails_the_request_before_the_teacher_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.submit()
    engine = FakeEngine()
    worker = bench.worker(engine)
    assert worker.step()
    monkeypatch.setattr(bench.store, "free_bytes", lambda: 100)
    assert worker.step()
    failure = bench.row().failure
    assert failure is not None and failure.code is Code.INSUFFICIENT_STORAGE and engine.scored == []
    monkeypatch.undo()
    bench.meta.retry(bench.spec.id)
    worker.run()
    assert bench.row().state == "complete"


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_token_file_is_made_again(bench: Bench, damage: str) -> None:
    bench.submit()
    worker = bench.worker(FakeEngine())
    assert worker.step() and worker.step()
    tokens = bench.row().tokens
    assert tokens is not None
    spoil(bench, tokens, damage)
    worker.run()
    assert bench.row().state == "complete" and bench.row().tokens == tokens and newest(bench).complete


def test_a_damaged_data_set_is_asked_for_again(bench: Bench) -> None:
    bench.submit()
    spoil(bench, bench.data, "flip")
    bench.worker(FakeEngine()).run()
    failure = bench.row().failure
    assert failure is not None and failure.code is Code.CORRUPT
    assert bench.meta.blob_kind(bench.data) is None and bench.store.size(bench.data) is None


def test_a_plan_survives_its_worker_and_a_stale_one_is_refused(bench: Bench) -> None:
    bench.submit()
    stale = bench.meta.lease("dead", 60)
    assert stale is not None and stale.number == PLAN and bench.row().state == "validating"
    assert bench.meta.release_owner("dead", "the worker was killed by signal 9") == 1
    assert bench.row().state == "queued"
    with pytest.raises(LeaseLost):
        bench.meta.renew(stale, 60)
    bench.worker(FakeEngine()).run()
    assert bench.row().state == "complete"


def spoil(bench: Bench, digest: str, damage: str) -> None:
    """Flip a byte of a blob, or remove it."""
    path = bench.store.local_path(digest)
    if damage == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_shard_is_encoded_while_the_next_one_is_scored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.submit()
    engine, finish, overlapped = FakeEngine(), ShardWriter.finish, Event()
    # two of the first shard, which is audited and finished before others begin, two again, two of the second
    engine.before_row = lambda: overlapped.set() if len(engine.scored) == 6 else None
    finished = []

    def late(writer: ShardWriter) -> int:
        finished.append(writer)
        # the second shard is encoded only once the third is being scored
        assert len(finished) != 2 or overlapped.wait(20)
        return finish(writer)

    monkeypatch.setattr(ShardWriter, "finish", late)
    bench.worker(engine).run()
    assert bench.row().state == "complete" and len(finished) == 3


def test_a_shard_that_cannot_be_finished_fails_its_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.submit()
    commit, committed = Staging.commit, []

    def full(staging: Staging, *expected: str) -> Any:
        committed.append(staging)
        # the token file, the first shard and its manifest have gone in
        if len(committed) > 3:
            raise InsufficientStorage("the disk is full")
        return commit(staging, *expected)

    monkeypatch.setattr(Staging, "commit", full)
    bench.worker(FakeEngine()).run()
    row = bench.row()
    assert row.state == "failed" and row.failure is not None and row.failure.code is Code.INSUFFICIENT_STORAGE
    assert row.shards_done == 1 and not list(bench.store.staging.iterdir())


def test_a_request_tells_that_its_teacher_loads(bench: Bench) -> None:
    bench.submit()
    told: list[str | None] = []

    def load(*args: object, **options: object) -> FakeEngine:
        told.append(bench.row().activity)
        return FakeEngine(before_row=lambda: told.append(bench.row().activity))

    worker = Worker(bench.settings, bench.store, bench.meta, Event(), load=load)
    assert worker.step() and worker.step()
    assert told[0] == "loading fake into transformers" and set(told[1:]) == {None}


def test_a_load_that_fails_is_not_told_for_ever(bench: Bench) -> None:
    bench.submit()

    def load(*args: object, **options: object) -> FakeEngine:
        raise EngineDied("no memory")

    worker = Worker(bench.settings, bench.store, bench.meta, Event(), load=load)
    assert worker.step() and worker.step()
    row = bench.row()
    assert (row.state, row.activity) == ("running", None)
