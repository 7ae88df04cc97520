"""Where a stream's shards come from: a server through the local cache, or a pulled directory."""

from __future__ import annotations

from typing import Protocol

from ..format_spec import Manifest, Shard, ShardDescriptor, is_digest
from .client import FIRST_POLL_S, MAX_POLL_S, POLL_GROWTH, Client
from .directory import CacheDirectory
from .errors import BadAnswer, CacheIncomplete, CacheNotFound, ConfigError, IntegrityError
from .views import COMPLETE


class Source(Protocol):
    """Gives the shards of one cache."""

    @property
    def manifest(self) -> Manifest:
        """The newest manifest seen."""

    def reach(self, sequences: int) -> Manifest:
        """Return a manifest that holds the first `sequences` sequences, waiting for the teacher."""

    def open(self, shard: ShardDescriptor) -> Shard:
        """Open a shard of the manifest."""

    def repair(self, shard: ShardDescriptor, error: Exception) -> None:
        """Make the next `open` read other bytes than those that gave `error`, or raise."""

    def cancel(self) -> None:
        """Make calls that other threads are in end soon, with an error."""

    def close(self) -> None:
        """Give back what is held."""


def covered(manifest: Manifest) -> int:
    """Return how many sequences from the first on a manifest holds without a gap."""
    end = 0
    for shard in manifest.shards:
        if shard.first != end:
            break
        end += shard.sequences
    return end


class DirectorySource:
    """A pulled directory; `cache`, when given, must be what it holds."""

    def __init__(self, directory: CacheDirectory, cache: str | None = None) -> None:
        self._directory = directory
        self._manifest = directory.manifest()
        if cache is not None and cache not in (self._manifest.request.id, self._manifest.digest):
            raise CacheNotFound(f"{directory.path} holds request {self._manifest.request.id}, not {cache}")
        if not self._manifest.complete:
            raise CacheIncomplete(f"{directory.path} holds an incomplete cache; pull it again")

    @property
    def manifest(self) -> Manifest:
        """The directory's manifest."""
        return self._manifest

    def reach(self, sequences: int) -> Manifest:
        """Return the manifest: it is complete."""
        return self._manifest

    def open(self, shard: ShardDescriptor) -> Shard:
        """Open the shard's file."""
        return Shard.open(self._directory.shard_path(shard))

    def repair(self, shard: ShardDescriptor, error: Exception) -> None:
        """Raise IntegrityError: there is nowhere to fetch from."""
        path = self._directory.shard_path(shard)
        raise IntegrityError(f"{path} cannot be read: {error}; pull the cache again") from error

    def cancel(self) -> None:
        """Do nothing: no call waits."""

    def close(self) -> None:
        """Do nothing: files belong to the shards."""


class ServerSource:
    """A cache on a server, by request id or manifest digest.

    Waits for the request to complete, or with `follow` only for its first shard.
    """

    def __init__(self, client: Client, cache: str, *, follow: bool = False) -> None:
        self._client = client
        self._cache = cache
        self._manifest = self._wait_for_shard() if follow else self._wait_for_all()

    @property
    def manifest(self) -> Manifest:
        """The newest manifest seen."""
        return self._manifest

    def reach(self, sequences: int) -> Manifest:
        """Return a manifest that holds the first `sequences` sequences, waiting for the teacher.

        Raises:
            RequestFailed: it will not come.
        """
        poll = FIRST_POLL_S
        while covered(self._manifest) < sequences:
            view = self._client.status(self._cache)
            if view.is_finished or view.shards_done > len(self._manifest.shards):
                self._manifest = self._client.manifest(self._cache)
                if covered(self._manifest) >= sequences:
                    break
            view.raise_if_failed()
            if view.state == COMPLETE:
                raise BadAnswer(f"request {self._cache} is complete, its manifest lacks sequence {sequences - 1}")
            self._client.transport.sleep(poll)
            poll = min(poll * POLL_GROWTH, MAX_POLL_S)
        return self._manifest

    def open(self, shard: ShardDescriptor) -> Shard:
        """Open the shard's file in the local cache, fetching it first when it is not there."""
        return Shard.open(self._client.cache.get(shard, self._client.transport))

    def repair(self, shard: ShardDescriptor, error: Exception) -> None:
        """Drop the damaged file, so that the shard is fetched again."""
        self._client.cache.discard(shard.digest)

    def cancel(self) -> None:
        """End waiting and transfers of other threads."""
        self._client.transport.cancel()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _wait_for_all(self) -> Manifest:
        try:
            manifest = self._client.manifest(self._cache)
        except CacheIncomplete:
            manifest = None
        if manifest is not None and manifest.complete:
            return manifest
        self._refuse_pinned()
        self._client.wait(self._cache)
        return self._client.manifest(self._cache)

    def _wait_for_shard(self) -> Manifest:
        poll = FIRST_POLL_S
        while True:
            try:
                manifest = self._client.manifest(self._cache)
                if not manifest.complete:
                    self._refuse_pinned()
                return manifest
            except CacheIncomplete:
                self._client.status(self._cache).raise_if_failed()
                self._client.transport.sleep(poll)
                poll = min(poll * POLL_GROWTH, MAX_POLL_S)

    def _refuse_pinned(self) -> None:
        if is_digest(self._cache):
            raise ConfigError(f"manifest {self._cache} is incomplete and never changes; name its request instead")
