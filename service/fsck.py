"""Whether what is stored is what the records say, every byte of it. The server must be stopped.

A record whose bytes are gone or damaged is a loss, which `repair` has made again; bytes that nothing records are left over
from a crash between disk and database, and only take room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .errors import CorruptBlob, NotFound
from .meta import Meta
from .repair import checked_path
from .store import LocalStore

Report = Callable[[int, int], None]


@dataclass(slots=True)
class Findings:
    """What was found: digests, and names of files in staging and quarantine."""

    checked: int = 0
    bytes: int = 0
    lost: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    repaired: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether everything that is recorded is there, or is being made again."""
        return self.repaired or not (self.lost or self.damaged)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"is_sound": self.is_sound}


def fsck(store: LocalStore, meta: Meta, *, repair: bool = False, report: Report = lambda done, total: None) -> Findings:
    """Read every blob that is recorded, and look for others.

    With `repair` what is damaged is set aside and what was made of it is marked to be made again, and what nothing
    records is removed.
    """
    found = Findings(repaired=repair)
    found.unfinished = sorted(path.name for path in store.staging.iterdir())
    recorded = meta.blobs()
    for number, (digest, size) in enumerate(sorted(recorded.items()), 1):
        try:
            store.checked_path(digest)
            found.checked += 1
            found.bytes += size
        except NotFound:
            found.lost.append(digest)
        except CorruptBlob:
            found.damaged.append(digest)
        report(number, len(recorded))
    found.orphans = sorted(set(store.digests()) - set(recorded))
    if repair:
        for digest in (*found.lost, *found.damaged):
            _make_again(digest, store, meta)
        for digest in found.orphans:
            store.remove(digest)
        store.sweep()
    found.quarantined = sorted(store.quarantined())
    return found


def _make_again(digest: str, store: LocalStore, meta: Meta) -> None:
    try:
        checked_path(digest, store, meta)
    except CorruptBlob:
        # which says that it has been set aside and its makers were told
        return
    raise AssertionError(f"{digest} was damaged a moment ago")
