"""A cache pulled into a directory: `manifest.json` and `shards/<64 hex>.tkc`. Readable without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..format_spec import Manifest, ShardDescriptor, digest_file
from ..format_spec.cache_folder import MANIFEST_NAME, shard_path
from ..format_spec.part import replacing, sweep
from .download import download
from .errors import CacheNotFound, CacheUnusable, ConfigError
from .transport import Transport


class CacheDirectory:
    """The directory at `path`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def manifest(self) -> Manifest:
        """Return its manifest.

        Raises:
            CacheNotFound: the directory holds none.
            ManifestError: it is damaged, or of another format version.
        """
        try:
            return Manifest.from_bytes((self.path / MANIFEST_NAME).read_bytes())
        except OSError as error:
            raise CacheNotFound(f"{self.path} holds no {MANIFEST_NAME}: {error.strerror or error}") from error

    def shard_path(self, shard: ShardDescriptor) -> Path:
        """Return where the shard lies."""
        return shard_path(self.path, shard.digest)

    def fill(
        self, manifest: Manifest, transport: Transport, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Fetch what is missing or damaged, the manifest last; `on_progress` gets (bytes done, bytes in all).

        Raises:
            ConfigError: the directory holds another cache.
        """
        if (self.path / MANIFEST_NAME).exists() and (held := self.manifest()).request.id != manifest.request.id:
            raise ConfigError(f"{self.path} holds another cache, of request {held.request.id}")
        sweep(self.path / "shards")
        done = 0

        def report(received: int) -> None:
            if on_progress is not None:
                on_progress(done + received, manifest.num_bytes)

        for shard in manifest.shards:
            path = self.shard_path(shard)
            if not (path.is_file() and path.stat().st_size == shard.bytes and digest_file(path) == shard.digest):
                download(transport, shard.digest, shard.bytes, path, on_bytes=report)
            done += shard.bytes
            report(0)
        try:
            with replacing(self.path / MANIFEST_NAME) as file:
                file.write(manifest.to_bytes())
        except OSError as error:
            raise CacheUnusable(f"cannot write {self.path}: {error.strerror or error}") from error
