"""Pauses between attempts: full jitter, until no progress was made for a given time.

Source of the jitter: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from .errors import ConnectionFailed, ServerError

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0

_log = logging.getLogger(__name__)


class Backoff:
    """Spaces out the attempts of one operation; `retry_s` bounds the time without progress."""

    def __init__(self, retry_s: float, sleep: Callable[[float], None]) -> None:
        self._retry_s = retry_s
        self._sleep = sleep
        self.progress()

    def progress(self) -> None:
        """Start the count again: something came through."""
        self._attempt = 0
        self._deadline = time.monotonic() + self._retry_s

    def pause(self, error: ConnectionFailed | ServerError) -> None:
        """Sleep before the next attempt, or raise `error` when the time is over."""
        asked = (error.retry_after_s or 0.0) if isinstance(error, ServerError) else 0.0
        pause = asked + random.uniform(0.0, min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**self._attempt))
        if time.monotonic() + pause > self._deadline:
            raise error
        self._attempt += 1
        _log.warning("%s; next attempt in %.1f s", error, pause)
        self._sleep(pause)
