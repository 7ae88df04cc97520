"""The watch over the replicas: each a worker process of its own, with its own engine and its own tasks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread

from .meta import Meta
from .replica import Replica

POLL_S = 0.5

_log = logging.getLogger(__name__)


class Supervisor:
    """Looks after one `Replica` for each of `environments`, in a thread."""

    def __init__(
        self, command: Sequence[str], log: Path, meta: Meta, environments: Sequence[Mapping[str, str]] = ({},)
    ) -> None:
        self._meta = meta
        self._replicas = [
            Replica(command, log if number == 0 else log.with_stem(f"{log.stem}-{number}"), meta, environment)
            for number, environment in enumerate(environments)
        ]
        self._drain_began = 0.0
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
        """Ask the workers to give back their tasks and end, and start no other; may be called in a signal handler."""
        if not self._draining.is_set():
            self._drain_began = time.monotonic()
        self._draining.set()
        for replica in self._replicas:
            replica.terminate()

    def stop(self, seconds: float) -> None:
        """Drain, and kill workers that are not gone `seconds` after the drain began."""
        self.drain()
        self._wake.set()
        self._thread.join()
        for replica in self._replicas:
            # one may have been started while the others were told
            replica.terminate()
        for replica in self._replicas:
            replica.stop(self._drain_began + seconds)

    @property
    def state(self) -> str:
        """What the workers do, in a few words."""
        if self._error is not None:
            return self._error
        states = Counter(replica.state for replica in self._replicas)
        if len(self._replicas) == 1:
            return next(iter(states))
        return "; ".join(f"{count} {state}" for state, count in states.items())

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._draining.is_set()

    @property
    def ready(self) -> bool:
        """Whether the workers of at least one replica stay alive."""
        return self._thread.is_alive() and any(replica.ready for replica in self._replicas)

    def _run(self) -> None:
        while not self._draining.is_set():
            try:
                for replica in self._replicas:
                    replica.tick()
                self._error = None
            # the watch must outlive a full disk or a busy database
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
                _log.exception("the supervisor failed")
            self._wake.wait(POLL_S)
            self._wake.clear()
