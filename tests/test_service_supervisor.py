"""The watch over the worker, with commands that stand in for one."""

from __future__ import annotations

from pathlib import Path

from fake_engine import Bench
from tiny_server import runs, wait_for

from teachercache.service.supervisor import Supervisor


def test_what_a_dead_worker_started_is_killed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit()
    told = tmp_path / "pid"
    # an engine in a process of its own, which outlives the worker
    command = ["sh", "-c", f"sleep 600 & echo $! > {told}.new; mv {told}.new {told}; exit 3"]
    supervisor = Supervisor(command, tmp_path / "worker.log", bench.meta)
    supervisor.start()
    try:
        pid = wait_for(lambda: int(told.read_text()) if told.exists() else None)
        wait_for(lambda: None if runs(pid) else True)
    finally:
        supervisor.stop(5)
    assert "exit code 3" in supervisor.state
