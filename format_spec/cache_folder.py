"""A cache in a folder, readable without a server: `manifest.json` and `shards/<64 hex>.tkc`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .constants import FILE_SUFFIX
from .digest import digest_file
from .errors import InvalidRows, SourceError, TargetError
from .fingerprint import Fingerprint
from .manifest import Manifest, QualityTally, ShardDescriptor
from .metadata import ShardMetadata
from .part import replacing
from .request import CacheRequest
from .rows import ScoredSequence
from .shard import ShardWriter

MANIFEST_NAME = "manifest.json"


def shard_path(folder: Path, digest: str) -> Path:
    """Return where a cache's folder has the shard with this digest."""
    return folder / "shards" / f"{digest.removeprefix('sha256:')}{FILE_SUFFIX}"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the cache in a folder.

    Raises:
        SourceError: the folder holds no cache.
        ManifestError: the manifest is damaged, or of another format version.
    """
    try:
        return Manifest.from_bytes((folder / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise SourceError.of(folder / MANIFEST_NAME, error) from error


def write_shard(
    path: Path, metadata: ShardMetadata, sequences: Iterable[ScoredSequence], first: int = 0
) -> QualityTally:
    """Write a shard that appears at `path` whole or not at all; return the quality of its rows.

    Raises:
        TargetError: the file cannot be written.
        InvalidRows: the format cannot hold these rows; the message counts sequences from `first`.
    """
    tally = QualityTally()
    with writable(path), replacing(path) as file:
        writer = ShardWriter(file, metadata)
        for number, sequence in enumerate(sequences, first):
            try:
                writer.add(sequence)
            except InvalidRows as error:
                raise InvalidRows(f"sequence {number}: {error}") from error
            tally.add(sequence.rows)
        writer.finish()
    return tally


class CacheWriter:
    """Writes a cache to a folder that holds none: shard after shard, the manifest last.

    Raises:
        TargetError: the folder cannot be written, or holds a cache already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: list[ShardDescriptor] = []
        self._tally = QualityTally()
        if (folder / MANIFEST_NAME).exists():
            raise TargetError(f"{folder} holds a cache already; name another folder")

    def add_shard(self, metadata: ShardMetadata, sequences: Iterable[ScoredSequence], first: int | None = None) -> None:
        """Write a shard whose first sequence is number `first` of the data set; by default the next one."""
        path = self.folder / "shards" / f"new{FILE_SUFFIX}"
        lengths: list[int] = []
        if first is None:
            first = self._shards[-1].first + self._shards[-1].sequences if self._shards else 0
        tally = write_shard(path, metadata, _measured(sequences, lengths), first)
        digest = digest_file(path)
        descriptor = ShardDescriptor(digest, path.stat().st_size, first, len(lengths), sum(lengths))
        with writable(path):
            path.replace(shard_path(self.folder, digest))
        self._shards.append(descriptor)
        self._tally.merge(tally.to_json())

    def finish(
        self, request: CacheRequest, fingerprint: Fingerprint, teacher_name: str, sequences: int | None = None
    ) -> Manifest:
        """Write the manifest; the cache is complete when its shards hold all `sequences` of the data set."""
        held = sum(shard.sequences for shard in self._shards)
        total = held if sequences is None else sequences
        shards = tuple(self._shards)
        manifest = Manifest(request, fingerprint, teacher_name, total, held == total, shards, self._tally.quality())
        with writable(self.folder), replacing(self.folder / MANIFEST_NAME) as file:
            file.write(manifest.to_bytes())
        return manifest


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn what the system says against writing into TargetError."""
    try:
        yield
    except OSError as error:
        raise TargetError(f"cannot write {path}: {error.strerror or error}") from error


def _measured(sequences: Iterable[ScoredSequence], lengths: list[int]) -> Iterator[ScoredSequence]:
    for sequence in sequences:
        lengths.append(len(sequence))
        yield sequence
