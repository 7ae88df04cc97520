"""The local cache: verified shards and manifests under one folder, shared by processes, limited in bytes.

CACHEDIR.TAG
blobs/sha256/ab/<64 hex>     a shard; its modification time is its last use
manifests/sha256-<hex>.json  a manifest by digest
manifests/request-<id>.json  the complete manifest of a request
parts/                       what is on its way
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..format_spec import Manifest, ManifestError, ShardDescriptor, digest_bytes
from ..format_spec.part import replacing, sweep
from .claim import claimed
from .download import download
from .errors import CacheUnusable, OfflineMiss
from .transport import Transport, is_offline

DEFAULT_LIMIT_BYTES = 100 * 10**9
# Other processes fetch, too: this one looks at the folder again after it used up this share of what was free.
FREE_SHARE = 8
CACHEDIR_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Shards fetched by teachercache; safe to delete.\n"


def default_cache_dir() -> Path:
    """Return TEACHERCACHE_CACHE_DIR, or the folder that the XDG specification gives."""
    if configured := os.environ.get("TEACHERCACHE_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "teachercache"


class BlobCache:
    """Verified blobs on local disk; beyond `limit_bytes` the longest unused ones go.

    Only files that a `BlobCache` fetched live in its folder, so nothing else can be evicted.
    """

    def __init__(self, root: Path | str | None = None, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.root = default_cache_dir() if root is None else Path(root)
        self.limit_bytes = limit_bytes
        self._parts = self.root / "parts"
        self._free_bytes = 0
        self._prepared = False

    def path(self, digest: str) -> Path:
        """Return where the blob lies when it is there."""
        hexdigits = digest.removeprefix("sha256:")
        return self.root / "blobs" / "sha256" / hexdigits[:2] / hexdigits

    def check_room(self, num_bytes: int, why: str) -> None:
        """Raise CacheUnusable when `num_bytes` do not fit into the limit."""
        if num_bytes > self.limit_bytes:
            raise CacheUnusable(
                f"{why} needs {num_bytes} bytes of local cache, above cache_limit_bytes {self.limit_bytes}"
            )

    def get(self, shard: ShardDescriptor, transport: Transport) -> Path:
        """Return the path of a shard's file, fetching it when it is not there.

        Raises:
            OfflineMiss: it is not there and the network is switched off.
            CacheUnusable: the folder cannot be written, or the limit is below the shard's size.
        """
        path = self.path(shard.digest)
        with self._access():
            if not self._use(path, shard.bytes):
                self._fetch(shard, path, transport)
        return path

    def held(self, shard: ShardDescriptor) -> Path | None:
        """Return the path of a shard's file when it is there."""
        path = self.path(shard.digest)
        with self._access():
            return path if self._use(path, shard.bytes) else None

    def discard(self, digest: str) -> None:
        """Remove a blob that turned out to be damaged."""
        with self._access():
            self.path(digest).unlink(missing_ok=True)

    def manifest(self, digest: str) -> Manifest | None:
        """Return the manifest with this digest when it is there and sound."""
        data = self._read(self._manifest_path("sha256", digest))
        return Manifest.from_bytes(data) if data is not None and digest_bytes(data) == digest else None

    def manifest_of(self, request_id: str) -> Manifest | None:
        """Return the complete manifest of a request when it is there and sound."""
        data = self._read(self._manifest_path("request", request_id))
        try:
            manifest = None if data is None else Manifest.from_bytes(data)
        except ManifestError:
            return None
        return manifest if manifest is not None and manifest.request.id == request_id else None

    def add_manifest(self, manifest: Manifest) -> None:
        """Keep a complete manifest."""
        self._prepare()
        for kind, name in (("sha256", manifest.digest), ("request", manifest.request.id)):
            path = self._manifest_path(kind, name)
            if self._read(path) != manifest.to_bytes():
                self._write(path, manifest.to_bytes())

    def _manifest_path(self, kind: str, name: str) -> Path:
        return self.root / "manifests" / f"{kind}-{name.removeprefix('sha256:')}.json"

    def _use(self, path: Path, num_bytes: int) -> bool:
        """Tell whether a blob is there with its full size, and note its use."""
        if not _has(path, num_bytes):
            return False
        # In a cache that someone else owns, or a read-only one, nothing is evicted by us either.
        with contextlib.suppress(OSError):
            os.utime(path)
        return True

    def _fetch(self, shard: ShardDescriptor, path: Path, transport: Transport) -> None:
        if is_offline():
            raise OfflineMiss(f"TEACHERCACHE_OFFLINE is set and {self.root} lacks shard {shard.digest}")
        self.check_room(shard.bytes, f"shard {shard.digest}")
        self._prepare()
        claim = self._parts / f"{path.name}.claim"
        with claimed(claim, lambda: _has(path, shard.bytes), transport.sleep) as refresh:
            if not _has(path, shard.bytes):
                download(transport, shard.digest, shard.bytes, path, parts=self._parts, on_bytes=lambda _: refresh())
        self._make_room(path, shard.bytes)

    def _make_room(self, kept: Path, num_bytes: int) -> None:
        self._free_bytes -= num_bytes
        if self._free_bytes < 0:
            self._free_bytes = (self.limit_bytes - self._evict(kept)) // FREE_SHARE

    def _evict(self, kept: Path) -> int:
        """Remove the longest unused blobs but `kept` until the rest fits; return its size."""
        blobs = []
        for path in (self.root / "blobs" / "sha256").glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                blobs.append((stat.st_mtime_ns, stat.st_size, path))
        used = sum(size for _, size, _ in blobs)
        for _, size, path in sorted(blobs):
            if used <= self.limit_bytes:
                break
            if path != kept:
                path.unlink(missing_ok=True)
                used -= size
        return used

    def _prepare(self) -> None:
        if self._prepared:
            return
        with self._access():
            self.root.mkdir(parents=True, exist_ok=True)
            sweep(self._parts)
        if not (self.root / "CACHEDIR.TAG").exists():
            self._write(self.root / "CACHEDIR.TAG", CACHEDIR_TAG.encode())
        self._prepared = True

    def _read(self, path: Path) -> bytes | None:
        with self._access():
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def _write(self, path: Path, data: bytes) -> None:
        with self._access(), replacing(path, self._parts) as file:
            file.write(data)

    @contextlib.contextmanager
    def _access(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheUnusable(f"cannot use the local cache in {self.root}: {error.strerror or error}") from error


def _has(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except FileNotFoundError:
        return False
