"""Verifying what is stored: every byte against its digest and every rule of SPEC.md, those that readers skip too."""

from __future__ import annotations

from dataclasses import dataclass

from .digest import digest_file
from .errors import FormatError, ManifestError
from .shard_set import Member, Report, ShardSet


@dataclass(frozen=True, slots=True)
class Damage:
    """A shard that must not be used, and the first thing that is wrong with it."""

    shard: str
    error: str


def verify(shards: ShardSet, report: Report | None = None) -> list[Damage]:
    """Read everything and return the damaged shards."""
    damaged = []
    for number, member in enumerate(shards.members, 1):
        try:
            _verify(shards, member)
        except FormatError as error:
            damaged.append(Damage(str(member.path), str(error)))
        if report is not None:
            report(number, len(shards.members))
    return damaged


def _verify(shards: ShardSet, member: Member) -> None:
    with shards.open(member) as shard:
        # a lone shard has no digest to be held against
        if member.descriptor is not None and digest_file(member.path) != member.descriptor.digest:
            raise ManifestError(f"{member.path} has another digest than its name says")
        shard.verify()
