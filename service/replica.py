"""One worker process: started when there is work, replaced when it dies or hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .meta import Meta, owner_of

MAX_BACKOFF_S = 30.0
# a worker that lived this long did not fail to start
SETTLED_S = 60.0
NOT_READY_AFTER = 3
MAX_LOG_BYTES = 16 * 2**20

_log = logging.getLogger(__name__)


class Replica:
    """Keeps one worker process alive while there is work; the worker ends by itself when idle.

    A worker whose lease has expired makes no progress and is killed. One that dies is started again after a
    pause that doubles up to `MAX_BACKOFF_S`. `environment` is what its environment has beside ours.
    """

    def __init__(self, command: Sequence[str], log: Path, meta: Meta, environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._log_path = log
        self._meta = meta
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._not_before = 0.0
        self._deaths = 0
        self._error: str | None = None

    @property
    def state(self) -> str:
        """What the worker does, in a few words."""
        if self._process is not None:
            return "running"
        return "idle" if self._error is None else f"starts again soon; {self._error}"

    @property
    def ready(self) -> bool:
        """Whether workers stay alive."""
        return self._deaths < NOT_READY_AFTER

    def tick(self) -> None:
        """Look after the process; to be called again and again, by one thread."""
        process = self._process
        if process is None:
            if time.monotonic() >= self._not_before and self._meta.has_work():
                self._start()
        elif (code := process.poll()) is not None:
            self._process = None
            _end_family(process)
            self._ended(process.pid, code)
        elif self._meta.overdue(owner_of(process.pid)):
            _log.error("worker %s has made no progress for the time of its lease: killing it", process.pid)
            process.kill()

    def terminate(self) -> None:
        """Ask the worker to give back its task and end; may be called in a signal handler."""
        process = self._process
        if process is not None:
            process.terminate()

    def stop(self, deadline: float) -> None:
        """Wait for the worker to end, and kill it at `deadline`, a time of the monotonic clock."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _end_family(process)
        # to be cut short is not its fault: the attempt does not count
        self._meta.release_owner(owner_of(process.pid), None)
        self._process = None

    def _start(self) -> None:
        if self._log_path.exists() and self._log_path.stat().st_size > MAX_LOG_BYTES:
            self._log_path.replace(self._log_path.with_suffix(".log.1"))
        with self._log_path.open("ab") as log:
            # its standard input ends when this process does, however that comes; Ctrl-C is for us alone
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self._environment,
            )
        self._started = time.monotonic()
        _log.info("started worker %s", self._process.pid)

    def _ended(self, pid: int, code: int) -> None:
        if code == 0:
            self._meta.release_owner(owner_of(pid), None)
            self._deaths, self._error = 0, None
            return
        self._error = f"the worker {describe_exit(code)}: {tail(self._log_path)}"
        self._meta.release_owner(owner_of(pid), self._error)
        settled = time.monotonic() - self._started > SETTLED_S
        self._deaths = 1 if settled else self._deaths + 1
        pause = min(2.0 ** (self._deaths - 1), MAX_BACKOFF_S)
        self._not_before = time.monotonic() + pause
        _log.error("%s; starting another in %.0f s", self._error, pause)


def _end_family(process: subprocess.Popen[bytes]) -> None:
    """Kill what an ended worker has left running: an engine's own processes outlive it."""
    assert process.stdin is not None
    process.stdin.close()
    # started in a session of its own, it led a group of all that it started
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Return what an exit code of subprocess means."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code}{hint}"


def tail(log: Path) -> str:
    """Return the last lines of a log, at most 3 and 500 characters of them."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-500:] if lines else "its log is empty"
