"""The records: single flight, fences, keyset pages, and what damage does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import Bench, FakeEngine, newest

from teachercache.format_spec import Code, Manifest, QualityTally, ShardDescriptor
from teachercache.service.database import Database
from teachercache.service.errors import InvalidSettings, JobFailed, LeaseLost, NotFound
from teachercache.service.meta import MAX_ATTEMPTS, CommittedShard, Failure, Lease
from teachercache.service.schema import NEXT_TASKS, SELECT_REQUEST, VERSION
from teachercache.service.sqlite_meta import SqliteMeta


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A data directory with a data set and a request for it."""
    return Bench(tmp_path)


def shard_of(bench: Bench, lease: Lease, data: bytes) -> CommittedShard:
    """Return a shard for a lease, its bytes stored."""
    blob, part = bench.store.put(data), lease.range
    descriptor = ShardDescriptor(blob.digest, blob.bytes, part.first, part.sequences, part.positions)
    return CommittedShard(descriptor, QualityTally().to_json())


def planned(bench: Bench) -> Lease:
    """Submit and plan the request, and lease its first range."""
    bench.submit()
    assert bench.worker(FakeEngine()).step()
    lease = bench.meta.lease("a", 60)
    assert lease is not None and lease.number == 0
    bench.meta.adopt_fingerprint(lease, FakeEngine().fingerprint(bench.spec.teacher, "sha256:" + "0" * 64))
    return lease


def test_of_many_who_ask_at_once_one_creates_the_request(bench: Bench) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: bench.meta.submit(bench.spec, "fake"), range(40)))
    assert sum(created for _, created in answers) == 1
    assert {row.id for row, _ in answers} == {bench.spec.id}
    assert len(bench.meta.requests(10)) == 1


def test_of_many_workers_each_leases_another_range(bench: Bench) -> None:
    bench.submit()
    assert bench.worker(FakeEngine()).step()
    with ThreadPoolExecutor(8) as pool:
        leases = list(pool.map(lambda i: bench.meta.lease(str(i), 60), range(8)))
    assert sorted(lease.number for lease in leases if lease is not None) == [0, 1, 2]


def test_a_stale_fence_commits_nothing(bench: Bench) -> None:
    stale = planned(bench)
    bench.meta.release_owner("a", "the worker died")
    fresh = bench.meta.lease("b", 60)
    assert fresh is not None and fresh.number == stale.number and fresh.fence > stale.fence
    with pytest.raises(LeaseLost):
        bench.meta.commit_shard(stale, shard_of(bench, stale, b"stale"), 1.0, bench.store.put)
    with pytest.raises(LeaseLost):
        bench.meta.renew(stale, 60, 8)
    with pytest.raises(LeaseLost):
        bench.meta.adopt_fingerprint(stale, FakeEngine().fingerprint(bench.spec.teacher, "sha256:" + "1" * 64))
    bench.meta.release(stale, "late")
    bench.meta.fail(stale, Failure(Code.INTERNAL, "late"))
    assert bench.row().state == "running" and bench.row().shards_done == 0 and bench.row().manifest is None
    bench.meta.commit_shard(fresh, shard_of(bench, fresh, b"fresh"), 1.0, bench.store.put)
    assert bench.row().shards_done == 1
    with pytest.raises(LeaseLost):
        bench.meta.commit_shard(fresh, shard_of(bench, fresh, b"fresh"), 1.0, bench.store.put)


def test_an_expired_lease_is_overdue_and_goes_to_the_next(bench: Bench) -> None:
    lease = planned(bench)
    assert not bench.meta.overdue("a")
    bench.meta.renew(lease, -1)
    assert bench.meta.overdue("a") and not bench.meta.overdue("b")
    fresh = bench.meta.lease("b", 60)
    assert fresh is not None and fresh.number == lease.number
    assert not bench.meta.overdue("a")


def test_a_lease_in_time_stays_with_its_owner(bench: Bench) -> None:
    lease = planned(bench)
    other = bench.meta.lease("b", 60)
    assert other is not None and other.number != lease.number


def test_a_range_whose_worker_dies_each_time_fails_the_request_with_its_last_words(bench: Bench) -> None:
    lease: Lease | None = planned(bench)
    for _ in range(MAX_ATTEMPTS):
        assert lease is not None and lease.number == 0
        bench.meta.release_owner("a", "the worker was killed by signal 11: segmentation fault")
        lease = bench.meta.lease("a", 60)
    assert lease is None and not bench.meta.has_work()
    failure = bench.row().failure
    assert failure is not None and "failed 3 times" in failure.detail and "signal 11" in failure.detail


def test_a_second_commit_s_manifest_holds_the_first_one_s_shard(bench: Bench) -> None:
    first = planned(bench)
    second = bench.meta.lease("b", 60)
    assert second is not None
    bench.meta.commit_shard(second, shard_of(bench, second, b"second"), 1.0, bench.store.put)
    bench.meta.commit_shard(first, shard_of(bench, first, b"first"), 1.0, bench.store.put)
    digest = bench.row().manifest
    assert digest is not None
    manifest = Manifest.from_bytes(bench.store.checked_path(digest).read_bytes())
    assert [shard.first for shard in manifest.shards] == [0, 2] and not manifest.complete


def test_only_a_failed_request_can_be_retried(bench: Bench) -> None:
    with pytest.raises(NotFound):
        bench.meta.retry(bench.spec.id)
    bench.submit()
    with pytest.raises(JobFailed, match="queued"):
        bench.meta.retry(bench.spec.id)


def test_pages_are_newest_first_and_stay_put_while_requests_come_in(bench: Bench) -> None:
    specs = [replace(bench.spec, seed=seed) for seed in range(6)]
    for spec in specs[:5]:
        bench.meta.submit(spec, "fake")
    page = bench.meta.requests(2)
    bench.meta.submit(specs[5], "fake")
    pages = [page, bench.meta.requests(2, page[-1].seq)]
    pages.append(bench.meta.requests(2, pages[-1][-1].seq))
    assert [row.spec.seed for page in pages for row in page] == [4, 3, 2, 1, 0]


def test_every_change_raises_the_version(bench: Bench) -> None:
    versions = [bench.submit().version]
    worker = bench.worker(FakeEngine())
    while worker.step():
        versions.append(bench.row().version)
    assert len(versions) == 5 and versions == sorted(set(versions))


def test_a_damaged_shard_leaves_a_partial_manifest_and_is_made_again_on_submit(bench: Bench) -> None:
    bench.submit()
    bench.worker(FakeEngine()).run()
    whole = bench.row().manifest
    assert whole is not None
    manifest = Manifest.from_bytes(bench.store.checked_path(whole).read_bytes())
    lost = manifest.shards[1].digest
    bench.store.quarantine(lost)
    bench.meta.damaged(lost, bench.store.put)
    row = bench.row()
    assert row.state == "failed" and row.failure is not None and row.failure.code is Code.CORRUPT
    assert lost in row.failure.detail and row.shards_done == 2 and row.manifest is not None
    partial = Manifest.from_bytes(bench.store.checked_path(row.manifest).read_bytes())
    assert not partial.complete and lost not in {shard.digest for shard in partial.shards}
    assert bench.submit().state == "queued"
    engine = FakeEngine()
    bench.worker(engine).run()
    assert bench.row().manifest == whole and sum(engine.scored) == 16


def test_a_damaged_manifest_is_written_again(bench: Bench) -> None:
    bench.submit()
    bench.worker(FakeEngine()).run()
    digest = bench.row().manifest
    assert digest is not None
    bench.store.quarantine(digest)
    bench.meta.damaged(digest, bench.store.put)
    assert bench.row().manifest == digest and bench.row().state == "complete"
    assert Manifest.from_bytes(bench.store.checked_path(digest).read_bytes()).complete


def test_a_file_s_digest_is_remembered_while_the_file_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.root / "file"
    path.write_bytes(b"one")
    first = bench.meta.file_digest(path)
    with monkeypatch.context() as patch:
        patch.setattr("teachercache.service.sqlite_meta.digest_file", lambda path: pytest.fail("hashed again"))
        assert bench.meta.file_digest(path) == first
    path.write_bytes(b"other")
    assert bench.meta.file_digest(path) != first


def test_the_rate_of_the_last_shard_is_kept(bench: Bench) -> None:
    key = bench.spec.teacher, bench.spec.engine, bench.spec.dtype
    assert bench.meta.rate(*key) is None
    bench.submit()
    bench.worker(FakeEngine()).run()
    rate = bench.meta.rate(*key)
    assert rate is not None and rate > 0


def test_a_write_waits_for_another_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    db = Database(tmp_path / "x.db", "CREATE TABLE t (a INTEGER);\n", 1)
    with pytest.raises(ZeroDivisionError):
        fail_halfway(db)
    with ThreadPoolExecutor(1) as pool:
        with db.write() as connection:
            connection.execute("INSERT INTO t VALUES (2)")
            waiting = pool.submit(insert, db)
            time.sleep(0.1)
            assert not waiting.done()
        waiting.result(10)
    assert [row["a"] for row in db.connection.execute("SELECT a FROM t")] == [2, 3]


def fail_halfway(db: Database) -> None:
    """Write, then raise."""
    with db.write() as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        raise ZeroDivisionError


def insert(db: Database) -> None:
    """Read, then write, which a deferred transaction could not do while another writes."""
    with db.write() as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone()[0] == 1
        connection.execute("INSERT INTO t VALUES (3)")


def test_commits_are_synced_and_logged_ahead(bench: Bench) -> None:
    db = Database(bench.settings.data_dir / "meta.db", "", VERSION)
    assert db.connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert db.connection.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_a_database_of_a_newer_version_or_none_at_all_is_refused(tmp_path: Path) -> None:
    SqliteMeta(tmp_path / "meta.db")
    Database(tmp_path / "meta.db", "", VERSION).connection.execute("PRAGMA user_version = 99")
    with pytest.raises(InvalidSettings, match="version 99"):
        SqliteMeta(tmp_path / "meta.db")
    (tmp_path / "other.db").write_bytes(b"not a database" * 100)
    with pytest.raises(InvalidSettings, match="not a database"):
        SqliteMeta(tmp_path / "other.db")


def test_manifests_do_not_grow_with_the_square_of_the_shards(tmp_path: Path) -> None:
    bench = Bench(tmp_path, sequences=400, shard_positions=8)
    bench.submit()
    worker, listed = bench.worker(FakeEngine()), []
    while worker.step():
        if bench.row().manifest is not None:
            listed.append(len(newest(bench).shards))
    assert listed[:100] == list(range(1, 101)) and listed[-1] == 400 and newest(bench).complete
    # never more than a twentieth behind
    assert all(done - known <= known / 20 for done, known in zip(range(1, 401), listed, strict=True))
    assert len(set(listed)) < 140


@pytest.mark.parametrize("query", NEXT_TASKS)
def test_the_next_task_is_found_without_looking_at_all_of_them(bench: Bench, query: str) -> None:
    """Ten thousand open ranges and a hundred thousand requests that are over must not slow it down."""
    plan = bench.meta._db.connection.execute("EXPLAIN QUERY PLAN " + query, {"now": 0.0}).fetchall()
    steps = [row["detail"] for row in plan]
    assert any("active_request" in step for step in steps) and any("next_task" in step for step in steps), steps
    assert not any("TEMP B-TREE" in step for step in steps), steps


def test_pages_of_requests_are_found_by_their_number(bench: Bench) -> None:
    query = SELECT_REQUEST + " WHERE ?1 IS NULL OR seq < ?1 ORDER BY seq DESC LIMIT ?2"
    plan = bench.meta._db.connection.execute("EXPLAIN QUERY PLAN " + query, (5, 50)).fetchall()
    steps = [row["detail"] for row in plan]
    assert not any("TEMP B-TREE" in step for step in steps), steps
    assert any("PRIMARY KEY (request_id=?)" in step for step in steps), steps
