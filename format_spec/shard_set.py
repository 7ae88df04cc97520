"""The shards that a path names: a shard file is one itself, a cache folder has those of its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .cache_folder import read_manifest, shard_path
from .codes import Code
from .errors import ManifestError, ShardError, SourceError
from .manifest import Manifest, ShardDescriptor
from .metadata import ShardMetadata
from .rows import ScoredSequence
from .shard import Shard

# told (done, in all)
Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Member:
    """One shard's file, and what the manifest says of it; a lone shard has no manifest."""

    path: Path
    descriptor: ShardDescriptor | None = None


class ShardSet:
    """The shards at `path`, in the order of the data set.

    Raises:
        SourceError: there is neither a shard nor a cache.
        ManifestError: the manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise SourceError(f"{path} does not exist", Code.NOT_FOUND)
        self.path = path
        self.manifest: Manifest | None = read_manifest(path) if path.is_dir() else None
        self.members: tuple[Member, ...] = (Member(path),)
        if self.manifest is not None:
            shards = self.manifest.shards
            self.members = tuple(Member(shard_path(path, shard.digest), shard) for shard in shards)
        if not self.members:
            raise SourceError(f"{path} holds a cache without a shard")

    @cached_property
    def metadata(self) -> ShardMetadata:
        """The metadata of the first shard; fingerprint, k, tail samples and profile are those of all."""
        with self.open(self.members[0]) as shard:
            return shard.metadata

    @cached_property
    def num_sequences(self) -> int:
        """Sequences in all shards."""
        if self.manifest is not None:
            return sum(shard.sequences for shard in self.manifest.shards)
        with self.open(self.members[0]) as shard:
            return shard.num_sequences

    @contextmanager
    def open(self, member: Member) -> Iterator[Shard]:
        """Open a shard, checked against the manifest; what the block finds wrong with it names its file."""
        try:
            with Shard.open(member.path) as shard:
                self._check(shard, member)
                yield shard
        except ShardError as error:
            raise type(error)(f"{member.path}: {error}", error.code) from error
        except OSError as error:
            raise SourceError.of(member.path, error) from error

    def sequence(self, number: int) -> ScoredSequence:
        """Return sequence `number` of them all.

        Raises:
            SourceError: there are not so many.
        """
        first = 0
        for member in self.members if number >= 0 else ():
            with self.open(member) as shard:
                if number < first + shard.num_sequences:
                    return shard.read(number - first)
                first += shard.num_sequences
        raise SourceError(f"{self.path} has {self.num_sequences} sequences, none of the number {number}")

    def sequences(self, report: Report | None = None) -> Iterator[ScoredSequence]:
        """Yield the sequences of all shards."""
        done = 0
        for member in self.members:
            with self.open(member) as shard:
                for sequence in shard:
                    yield sequence
                    done += 1
                    if report is not None:
                        report(done, self.num_sequences)

    def _check(self, shard: Shard, member: Member) -> None:
        if self.manifest is None or member.descriptor is None:
            return
        request, own = self.manifest.request, shard.metadata
        said = (self.manifest.fingerprint, request.k, request.tail_samples, request.profile)
        if (own.fingerprint, own.k, own.tail_samples, own.profile) != said:
            raise ManifestError(f"{member.path} was made by another teacher, or otherwise, than the manifest says")
        if (shard.num_sequences, shard.num_positions) != (member.descriptor.sequences, member.descriptor.positions):
            raise ManifestError(f"{member.path} has other sequences than the manifest says")
