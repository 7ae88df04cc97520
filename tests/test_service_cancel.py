"""What nobody wants any more stops; what is done of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import Bench, FakeEngine, newest
from tiny_server import TinyServer, problem, random_examples, tiny_teacher, wait_for, write_examples

from teachercache.client import Client, RequestFailed
from teachercache.service.errors import Forbidden, LeaseLost, NotFound

__all__ = ["tiny_teacher"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_work_goes_on_while_anybody_wants_it(bench: Bench) -> None:
    for owner in ("ada", "bob"):
        bench.meta.submit(bench.spec, "fake", owner)
    assert bench.row().owners == ("ada", "bob")
    worker = bench.worker(FakeEngine())
    assert worker.step() and worker.step()
    row = bench.meta.cancel(bench.spec.id, "ada")
    assert (row.state, row.owners) == ("running", ("bob",))
    lease = bench.meta.lease("somebody", 60)
    assert lease is not None
    row = bench.meta.cancel(bench.spec.id, "bob")
    assert (row.state, row.owners, row.shards_done) == ("cancelled", (), 1)
    with pytest.raises(LeaseLost):
        bench.meta.renew(lease, 60)
    assert bench.meta.lease("somebody", 60) is None and not bench.meta.has_work()
    before = newest(bench).shards
    # whoever asks again goes on from there
    row, created = bench.meta.submit(bench.spec, "fake", "eve")
    assert (row.state, row.owners, created) == ("queued", ("eve",), False)
    engine = FakeEngine()
    worker = bench.worker(engine)
    while worker.step():
        pass
    assert bench.row().state == "complete" and newest(bench).shards[:1] == before
    assert sum(engine.scored) == 32


def test_only_ones_own_request_or_with_admin_any(bench: Bench) -> None:
    bench.meta.submit(bench.spec, "fake", "ada")
    with pytest.raises(Forbidden, match="is one of ada, not of bob"):
        bench.meta.cancel(bench.spec.id, "bob")
    with pytest.raises(NotFound):
        bench.meta.cancel("0" * 64, "bob")
    assert bench.meta.cancel(bench.spec.id, "eve", everybody=True).state == "cancelled"


def test_what_is_complete_stays_so(bench: Bench) -> None:
    bench.meta.submit(bench.spec, "fake", "ada")
    worker = bench.worker(FakeEngine())
    while worker.step():
        pass
    row = bench.meta.cancel(bench.spec.id, "ada")
    assert (row.state, row.owners) == ("complete", ())


def test_a_running_request_is_cancelled_and_taken_up_again(tiny_teacher: Path, tmp_path: Path) -> None:
    data = write_examples(tmp_path / "data.parquet", random_examples(300))
    with (
        TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}") as server,
        Client(server.url, cache_dir=tmp_path / "cache") as client,
    ):
        view = client.submit(teacher="tiny", data=client.upload(data), k=4, shard_positions=64)
        server.wait(view.id, lambda found: found["shards_done"] > 2)
        cancelled = client.cancel(view.id)
        assert cancelled.state == "cancelled"
        with pytest.raises(RequestFailed, match="submit it again"):
            client.wait(view.id)
        done = wait_for(lambda: client.status(view.id)).shards_done
        assert problem(server.http.post(f"/v1/requests/{view.id}/cancel"))["code"] == "forbidden"
        again = client.submit(teacher="tiny", data=view.request["data"], k=4, shard_positions=64)
        assert again.id == view.id and not again.created and again.state != "cancelled"
        complete = client.wait(view.id, timeout_s=60)
        assert complete.shards_done >= done and complete.state == "complete"
