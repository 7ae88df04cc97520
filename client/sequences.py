"""Any sequence of a cache on a server, without fetching its shard."""

from __future__ import annotations

from collections.abc import Iterator

from ..format_spec import Manifest, ScoredSequence, Shard, ShardDescriptor
from .client import Client
from .ranges import BlobRanges
from .reader import SequenceReader


class Sequences:
    """Random access to a cache, made by `Client.sequences`; a context manager.

    A sequence costs one ranged read, and the first of a shard one more, for its last 64 KiB (two where its index
    is larger). Shards that the local cache holds are read there; nothing is added to it. Footers and frames are
    verified against their checksums; size, counts, fingerprint and settings of a shard against the manifest. The
    digest of a shard cannot be told from parts of it: where the server itself is not trusted, pull the cache.
    """

    def __init__(self, client: Client, cache: str) -> None:
        self._source = RangeSource(client, client.manifest(cache))
        self._reader = SequenceReader(self._source)

    def __enter__(self) -> Sequences:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Sequences of the data set, those that the teacher has not come to among them."""
        return self.manifest.sequences

    @property
    def manifest(self) -> Manifest:
        """The cache's manifest, as it was when this was made."""
        return self._source.manifest

    def read(self, number: int) -> ScoredSequence:
        """Return sequence `number` of the data set.

        Raises:
            ConfigError: the data set has no such number.
            CacheIncomplete: the teacher had not come to it.
            IntegrityError: its shard is damaged.
            BadAnswer: the server, or something before it, ignores ranges.
        """
        return self._reader.read(number)

    def find(self, key: bytes) -> Iterator[int]:
        """Yield the numbers of the sequences with this content key, ascending; see `content_key`.

        Shards are asked one after the other, as far as the iterator is taken. Indexes hold 8 bytes of a key.
        """
        return self._reader.find(key)

    def close(self) -> None:
        """Close the shards of the local cache."""
        self._reader.close()


class RangeSource:
    """The shards of a manifest, read in ranges unless the local cache holds them."""

    def __init__(self, client: Client, manifest: Manifest) -> None:
        self._client = client
        self.manifest = manifest

    def reach(self, sequences: int) -> Manifest:
        """Return the manifest: it stays as it is."""
        return self.manifest

    def open(self, shard: ShardDescriptor) -> Shard:
        """Open the shard where it is."""
        held = self._client.cache.held(shard)
        if held is not None:
            return Shard.open(held)
        return Shard.ranged(shard.bytes, BlobRanges(self._client.transport, shard.digest, shard.bytes).read)

    def repair(self, shard: ShardDescriptor, error: Exception) -> None:
        """Drop a damaged file, so that the shard is read on the server."""
        self._client.cache.discard(shard.digest)

    def cancel(self) -> None:
        """Do nothing: the client is the caller's."""

    def close(self) -> None:
        """Do nothing: the client is the caller's."""
