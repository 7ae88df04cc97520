"""The watch over the worker process: started when there is work, replaced when it dies or hangs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

from .meta import Meta, owner_of

POLL_S = 0.5
MAX_BACKOFF_S = 30.0
# a worker that lived this long did not fail to start
SETTLED_S = 60.0
NOT_READY_AFTER = 3
MAX_LOG_BYTES = 16 * 2**20

_log = logging.getLogger(__name__)


class Supervisor:
    """Keeps one worker process alive while there is work; the worker ends by itself when idle.

    A worker whose lease has expired makes no progress and is killed. One that dies is started again after a
    pause that doubles up to `MAX_BACKOFF_S`.
    """

    def __init__(self, command: Sequence[str], log: Path, meta: Meta) -> None:
        self._command = list(command)
        self._log_path = log
        self._meta = meta
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._not_before = self._drain_began = 0.0
        self._deaths = 0
        self._error: str | None = None
        self._wake, self._draining = Event(), Event()
        self._thread = Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Begin to watch; leases that a former server left are taken back first."""
        self._meta.release_owner(None, "the server ended while it was worked on")
        self._thread.start()

    def wake(self) -> None:
        """Look for work now rather than at the next poll."""
        self._wake.set()

    def drain(self) -> None:
        """Ask the worker to give back its task and end, and start no other; may be called in a signal handler."""
        if not self._draining.is_set():
            self._drain_began = time.monotonic()
        self._draining.set()
        process = self._process
        if process is not None:
            process.terminate()

    def stop(self, seconds: float) -> None:
        """Drain, and kill a worker that is not gone `seconds` after the drain began."""
        self.drain()
        self._wake.set()
        self._thread.join()
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(max(0.0, self._drain_began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close_input(process)
        # to be cut short is not its fault: the attempt does not count
        self._meta.release_owner(owner_of(process.pid), None)
        self._process = None

    @property
    def state(self) -> str:
        """What the worker does, in a few words."""
        if self._process is not None:
            return "running"
        return "idle" if self._error is None else f"starts again soon; {self._error}"

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._draining.is_set()

    @property
    def ready(self) -> bool:
        """Whether workers stay alive."""
        return self._thread.is_alive() and self._deaths < NOT_READY_AFTER

    def _run(self) -> None:
        while not self._draining.is_set():
            try:
                self._tick()
            # the watch must outlive a full disk or a busy database
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
                _log.exception("the supervisor failed")
            self._wake.wait(POLL_S)
            self._wake.clear()

    def _tick(self) -> None:
        process = self._process
        if process is None:
            if time.monotonic() >= self._not_before and self._meta.has_work():
                self._start()
        elif (code := process.poll()) is not None:
            self._process = None
            _close_input(process)
            self._ended(process.pid, code)
        elif self._meta.overdue(owner_of(process.pid)):
            _log.error("worker %s has made no progress for the time of its lease: killing it", process.pid)
            process.kill()

    def _start(self) -> None:
        if self._log_path.exists() and self._log_path.stat().st_size > MAX_LOG_BYTES:
            self._log_path.replace(self._log_path.with_suffix(".log.1"))
        with self._log_path.open("ab") as log:
            # its standard input ends when this process does, however that comes; Ctrl-C is for us alone
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
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


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


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
