"""kill -9 at any time: what was committed stays, the rest is made again, and comes out the same."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_server import TinyServer, random_examples, runs, tiny_teacher, wait_for, write_examples

from teachercache.format_spec import Manifest
from teachercache.service.meta import owner_of
from teachercache.service.replica import describe_exit
from teachercache.service.sqlite_meta import SqliteMeta
from teachercache.service.supervisor import Supervisor

__all__ = ["tiny_teacher"]

SETTINGS: dict[str, Any] = {"k": 4, "tail_samples": 4, "shard_positions": 64}
EXAMPLES = 60


def some_shards_done(view: dict[str, Any]) -> bool:
    """Tell whether a request is between its first and its last shard."""
    assert view["state"] != "complete", "too late to kill anything"
    return bool(view["shards_done"] >= 3)


def shards_are_there(server: TinyServer, request_id: str) -> None:
    """Check that every shard of the newest manifest can be fetched whole."""
    assert list(server.sequences(server.manifest(request_id)))


@pytest.fixture(scope="module")
def undisturbed(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """A data set, and the manifest of a run in which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = write_examples(folder / "x.parquet", random_examples(EXAMPLES, seed=3))
    with TinyServer(folder / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        view = server.complete(server.upload(path), **SETTINGS)
        assert view["shards_total"] > 20
        return path, server.manifest(view["id"])


def test_a_killed_worker_is_replaced_and_its_range_made_again(
    tiny_teacher: Path, tmp_path: Path, undisturbed: tuple[Path, Manifest]
) -> None:
    path, expected = undisturbed
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        request_id = server.submit(server.upload(path), **SETTINGS).json()["id"]
        server.wait(request_id, some_shards_done)
        worker = server.worker()
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        before = server.manifest(request_id)
        assert not before.complete
        shards_are_there(server, request_id)
        view = server.wait(request_id)
        assert view["state"] == "complete", view["error"]
        assert "was killed by signal 9" in server.log_text()
        manifest = server.manifest(request_id)
        assert manifest == expected and manifest.shards[: len(before.shards)] == before.shards
        # only what was in flight is scored twice
        assert 0 <= view["teacher_tokens_scored"] - view["positions_total"] <= SETTINGS["shard_positions"]


def test_a_killed_server_takes_its_worker_along_and_the_next_one_goes_on(
    tiny_teacher: Path, tmp_path: Path, undisturbed: tuple[Path, Manifest]
) -> None:
    path, expected = undisturbed
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        request_id = server.submit(server.upload(path), **SETTINGS).json()["id"]
        server.wait(request_id, some_shards_done)
        worker = server.worker()
        assert worker is not None
        known = server.manifest(request_id)
        server.end(signal.SIGKILL, -signal.SIGKILL)
    wait_for(lambda: None if runs(worker) else True)
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        assert server.manifest(request_id).shards[: len(known.shards)] == known.shards
        shards_are_there(server, request_id)
        view = server.wait(request_id)
        assert view["state"] == "complete", view["error"]
        assert server.manifest(request_id) == expected


def test_sigterm_gives_the_range_back_in_time(
    tiny_teacher: Path, tmp_path: Path, undisturbed: tuple[Path, Manifest]
) -> None:
    path, _ = undisturbed
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        request_id = server.submit(server.upload(path), **SETTINGS).json()["id"]
        server.wait(request_id, some_shards_done)
        worker = server.worker()
        assert worker is not None
        begin = time.monotonic()
        server.end(signal.SIGTERM, 0)
    assert time.monotonic() - begin < 15 and not runs(worker)
    meta = SqliteMeta(tmp_path / "data" / "meta.db")
    lease = meta.lease("test", 60)
    assert lease is not None and lease.request.id == request_id and lease.request.state == "running"
    assert list((tmp_path / "data" / "staging").iterdir()) == []


class Records(SqliteMeta):
    """Records of which a test says whether there is work, and that remember what was taken back."""

    work = False

    def has_work(self) -> bool:
        """Tell what the test says."""
        return self.work

    def release_owner(self, owner: str | None, error: str | None) -> int:
        """Remember the call."""
        self.released = [*getattr(self, "released", []), (owner, error)]
        return super().release_owner(owner, error)


def supervised(tmp_path: Path, script: str) -> tuple[Supervisor, Records]:
    """Return a supervisor whose worker is a script."""
    records = Records(tmp_path / "meta.db")
    return Supervisor([sys.executable, "-c", script], tmp_path / "worker.log", records), records


def test_no_work_no_worker(tmp_path: Path) -> None:
    supervisor, records = supervised(tmp_path, "import time; time.sleep(60)")
    supervisor.start()
    time.sleep(0.7)
    assert supervisor.state == "idle" and worker_of(tmp_path) is None
    records.work = True
    supervisor.wake()
    wait_for(lambda: True if supervisor.state == "running" else None)
    supervisor.stop(5)
    assert worker_of(tmp_path) is None


def test_a_worker_that_dies_at_once_is_started_ever_more_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachercache.service.supervisor.POLL_S", 0.01)
    supervisor, records = supervised(
        tmp_path, "import time; print(time.time(), flush=True); raise SystemExit('no torch here')"
    )
    records.work = True
    supervisor.start()
    log = tmp_path / "worker.log"
    wait_for(lambda: True if log.exists() and log.read_text().count("no torch here") == 3 else None)
    wait_for(lambda: None if supervisor.ready else True)
    assert "ended with exit code 1" in supervisor.state and "no torch here" in supervisor.state
    assert supervisor.draining is False
    supervisor.stop(5)
    starts = [float(line) for line in log.read_text().splitlines() if line[0].isdigit()]
    assert starts[1] - starts[0] >= 1 and starts[2] - starts[1] >= 2
    assert records.released[0] == (None, "the server ended while it was worked on")
    assert all("no torch here" in error for _, error in records.released[1:3])


def test_a_worker_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, records = supervised(tmp_path, "import time; time.sleep(60)")
    hung: list[str] = []

    def overdue(owner: str) -> bool:
        hung.append(owner)
        records.work = False
        return True

    monkeypatch.setattr(records, "overdue", overdue)
    records.work = True
    supervisor.start()
    wait_for(lambda: True if len(records.released) > 1 else None)
    assert records.released[1][0] == hung[0] and hung[0].startswith(owner_of(0)[:-1])
    assert "was killed by signal 9" in str(records.released[1][1])
    supervisor.stop(5)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_drain(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    supervisor, records = supervised(tmp_path, script)
    records.work = True
    supervisor.start()
    wait_for(lambda: True if "up" in log_of(tmp_path) else None)
    begin = time.monotonic()
    supervisor.stop(0.5)
    assert 0.4 < time.monotonic() - begin < 5
    assert worker_of(tmp_path) is None
    # being cut short does not count against the range
    assert records.released[-1][1] is None


def worker_of(tmp_path: Path) -> int | None:
    """Return the process that has the worker's log open."""
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            if pid.name != str(os.getpid()) and (pid / "fd" / "1").resolve() == tmp_path / "worker.log":
                return int(pid.name)
        except OSError:
            continue
    return None


def log_of(tmp_path: Path) -> str:
    """Return what the worker printed."""
    log = tmp_path / "worker.log"
    return log.read_text() if log.exists() else ""


def test_exit_codes_are_explained() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by signal 11"
    assert "want of memory" in describe_exit(-signal.SIGKILL)
