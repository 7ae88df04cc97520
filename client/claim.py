"""A file that says "I am fetching this", so that the ranks of one machine do not all fetch the same shard.

Only a courtesy: nothing breaks when two processes fetch at once. So there are no locks, which network
file systems lack or fake; and a claim whose owner died, or stands still, is taken over.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

STALE_S = 10.0
REFRESH_S = 1.0
POLL_S = 0.05


@contextlib.contextmanager
def claimed(path: Path, is_done: Callable[[], bool], sleep: Callable[[float], None]) -> Iterator[Callable[[], None]]:
    """Hold the claim at `path`, or go on without once `is_done`; gives the function that keeps it fresh."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = _acquire(path, is_done, sleep)
    touched = time.monotonic()

    def refresh() -> None:
        nonlocal touched
        if time.monotonic() - touched > REFRESH_S:
            touched = time.monotonic()
            # Somebody who found us too slow has taken over; both go on.
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)

    try:
        yield refresh
    finally:
        if held:
            path.unlink(missing_ok=True)


def _acquire(path: Path, is_done: Callable[[], bool], sleep: Callable[[float], None]) -> bool:
    seen, since = -1, time.monotonic()
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return True
        except FileExistsError:
            pass
        if is_done():
            return False
        # The age is measured by our own clock: a file server's may differ.
        touched = _touched(path)
        if touched != seen:
            seen, since = touched, time.monotonic()
        elif time.monotonic() - since > STALE_S:
            path.unlink(missing_ok=True)
        sleep(POLL_S)


def _touched(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return -1
