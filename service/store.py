"""Content-addressed blobs on disk, each durable before anything names it.

The order is: staging file (created exclusively), write and hash, fsync, rename, fsync of the folder. Only
then may the database or a manifest name the digest.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from ..format_spec import digest_file, is_digest
from .errors import CorruptBlob, DigestMismatch, InsufficientStorage, NotFound

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob in the store."""

    digest: str
    bytes: int


class Staging:
    """A blob being written; it is in the store after `commit`, and gone when the block ends without one.

    It has the methods of a binary file that writers of Parquet and shards use.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._path = store.staging / f"{uuid.uuid4().hex}.part"
        self._hash = hashlib.sha256()
        self.bytes = 0
        with _disk_errors():
            self._file: BinaryIO = self._path.open("xb")

    def write(self, data: bytes) -> int:
        """Append `data`.

        Raises:
            InsufficientStorage: the disk is full.
        """
        with _disk_errors():
            self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)
        return len(data)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._file.closed

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.bytes

    def flush(self) -> None:
        """Do nothing: `commit` is what makes bytes durable."""

    def written(self) -> Path:
        """Return a file with all that was written so far, to be read before `commit`."""
        with _disk_errors():
            self._file.flush()
        return self._path

    def commit(self, expected: str | None = None) -> Blob:
        """Make the blob durable under its digest.

        Raises:
            DigestMismatch: the digest is not `expected`.
            InsufficientStorage: the disk is full.
        """
        digest = "sha256:" + self._hash.hexdigest()
        if expected is not None and digest != expected:
            raise DigestMismatch(f"the {self.bytes} bytes received have digest {digest}, not {expected}")
        with _disk_errors():
            self._file.flush()
            os.fchmod(self._file.fileno(), 0o444)
            os.fsync(self._file.fileno())
            self._file.close()
            self._store.publish(self._path, digest)
        return Blob(digest, self.bytes)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # closing flushes what is buffered, which a full disk refuses again
            self._file.close()
        except OSError as failure:
            if failure.errno not in _FULL:
                raise
        finally:
            self._path.unlink(missing_ok=True)


class Store(Protocol):
    """Where blobs are kept; every method may be called from any thread."""

    def stage(self, expected_bytes: int = 0) -> Staging:
        """Begin a blob of about `expected_bytes`; raises InsufficientStorage when they would not fit."""

    def put(self, data: bytes) -> Blob:
        """Store `data` durably."""

    def size(self, digest: str) -> int | None:
        """Return the size of a blob in bytes, None when it is not there."""

    def local_path(self, digest: str) -> Path:
        """Return a local file with the blob; raises NotFound."""

    def checked_path(self, digest: str) -> Path:
        """Return a local file whose bytes were verified since they last changed; raises NotFound, CorruptBlob."""

    def quarantine(self, digest: str) -> None:
        """Take a damaged blob out of the store, keeping its bytes for a look."""

    def free_bytes(self) -> int:
        """Return how many bytes may still be written before the reserve is touched."""


class LocalStore:
    """A store in a folder of a local file system.

    A blob is hashed before its first use in this process, and again when its size, time or inode has changed
    since: 10 ms for a shard of 18 MB, then nothing.
    """

    def __init__(self, root: Path, reserve: int = 0) -> None:
        self.reserve = reserve
        self.staging = root / "staging"
        self._blobs = root / "blobs" / "sha256"
        self._quarantine = root / "quarantine"
        # small values: a lab has many shards
        self._checked: dict[bytes, int] = {}
        self._lock = threading.Lock()
        # all made and synced now: a blob is lost with a folder that its parent does not list
        for folder in (self.staging, self._quarantine, *(self._blobs / f"{i:02x}" for i in range(256))):
            folder.mkdir(parents=True, exist_ok=True)
        _fsync_folder(self._blobs)

    def sweep(self) -> int:
        """Remove what killed processes left in staging; return how many files. Only while nobody writes."""
        left = list(self.staging.iterdir())
        for path in left:
            path.unlink()
        return len(left)

    def stage(self, expected_bytes: int = 0) -> Staging:
        """Begin a blob of about `expected_bytes`.

        Raises:
            InsufficientStorage: they would not fit above the reserve.
        """
        free = self.free_bytes()
        if expected_bytes > free:
            raise InsufficientStorage(
                f"{expected_bytes} bytes do not fit: {max(free, 0)} are free above the reserve of {self.reserve}"
            )
        return Staging(self)

    def put(self, data: bytes) -> Blob:
        """Store `data` durably."""
        with self.stage(len(data)) as staging:
            staging.write(data)
            return staging.commit()

    def publish(self, path: Path, digest: str) -> None:
        """Move a synced file to its place and make the move durable."""
        target = self._path(digest)
        os.rename(path, target)
        _fsync_folder(target.parent)

    def size(self, digest: str) -> int | None:
        """Return the size of a blob in bytes, None when it is not there."""
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def local_path(self, digest: str) -> Path:
        """Return the file of a blob; raises NotFound."""
        path = self._path(digest)
        if not path.is_file():
            raise NotFound(f"there is no blob {digest}")
        return path

    def checked_path(self, digest: str) -> Path:
        """Return the file of a blob, hashed first unless that was done since it last changed.

        Raises:
            NotFound: there is no such blob.
            CorruptBlob: its bytes have another digest.
        """
        path = self.local_path(digest)
        stat = path.stat()
        key, state = bytes.fromhex(path.name), hash((stat.st_size, stat.st_mtime_ns, stat.st_ino))
        with self._lock:
            known = self._checked.get(key) == state
        if not known:
            found = digest_file(path)
            if found != digest:
                raise CorruptBlob(f"the bytes stored as {digest} have digest {found}")
            with self._lock:
                self._checked[key] = state
        return path

    def quarantine(self, digest: str) -> None:
        """Move a damaged blob to the quarantine folder; the last one of a digest is kept."""
        path = self._path(digest)
        if path.exists():
            os.rename(path, self._quarantine / path.name)
            _fsync_folder(path.parent)

    def digests(self) -> Iterator[str]:
        """Yield the digests of all blobs that are there."""
        for path in self._blobs.glob("??/*"):
            yield f"sha256:{path.name}"

    def quarantined(self) -> list[str]:
        """Return the names of the files that were set aside."""
        return [path.name for path in self._quarantine.iterdir()]

    def remove(self, digest: str) -> None:
        """Remove a blob that nothing names."""
        path = self._path(digest)
        path.unlink(missing_ok=True)
        _fsync_folder(path.parent)

    def free_bytes(self) -> int:
        """Return how many bytes may still be written before the reserve is touched."""
        return shutil.disk_usage(self.staging).free - self.reserve

    def _path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise NotFound(f"{digest!r} is not a digest (sha256:<hex>)")
        name = digest.removeprefix("sha256:")
        return self._blobs / name[:2] / name


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise InsufficientStorage(f"the disk is full: {error.strerror}") from error
        raise
