"""How far something is: a bar on a terminal, plain lines elsewhere, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Report = Callable[[int, int | None, str], None]

LINE_EVERY_S = 10.0


@contextlib.contextmanager
def progress(label: str) -> Iterator[Report]:
    """Give a function that is told (done, total, note)."""
    with _bar(label) if sys.stderr.isatty() else contextlib.nullcontext(_Lines(label).report) as report:
        yield report


@contextlib.contextmanager
def counting(label: str, unit: str = "sequences") -> Iterator[Callable[[int, int], None]]:
    """Give a function that is told (done, total) of things named `unit`."""
    with progress(label) as report:
        yield lambda done, total: report(done, total, f"{unit} {done} of {total}")


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None, note="")
        yield lambda done, total, note: bar.update(task, completed=done, total=total, note=note)


class _Lines:
    """One line when the note changes its first word, and every few seconds."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._stage = ""
        self._printed = 0.0

    def report(self, done: int, total: int | None, note: str) -> None:
        stage, now = note.partition(" ")[0], time.monotonic()
        if stage != self._stage or now - self._printed >= LINE_EVERY_S:
            self._stage, self._printed = stage, now
            share = "" if not total else f" {100 * done // total}%"
            print(f"{self._label}:{share} {note}", file=sys.stderr, flush=True)
