"""Part files: what is being written lies under a name of its own, and takes its place whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".part"
STALE_S = 24 * 3600.0


@contextlib.contextmanager
def replacing(target: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Give a new file in `folder` (default: beside the target) that becomes `target`, durably, at the end.

    When the block raises, the target stays as it was. No two calls share a part file.
    """
    part = (folder or target.parent) / f"{target.name}.{os.getpid()}.{secrets.token_hex(4)}{SUFFIX}"
    part.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with part.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove part files that nobody has touched for a day: their process was killed."""
    for part in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > STALE_S:
                part.unlink()
