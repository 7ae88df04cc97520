"""Blobs: durable before they have a name, verified before they are used, nothing half-written ever seen."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from teachercache.format_spec import digest_bytes
from teachercache.service.errors import CorruptBlob, DigestMismatch, InsufficientStorage, NotFound
from teachercache.service.store import LocalStore

DATA = b"some bytes" * 1000


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty store."""
    return LocalStore(tmp_path)


def staged(store: LocalStore) -> list[Path]:
    """Return the files in staging."""
    return list(store.staging.iterdir())


def test_what_is_put_is_what_is_read(store: LocalStore) -> None:
    blob = store.put(DATA)
    assert blob.digest == digest_bytes(DATA) and blob.bytes == store.size(blob.digest) == len(DATA)
    path = store.checked_path(blob.digest)
    assert path.read_bytes() == DATA and path.stat().st_mode & 0o777 == 0o444
    assert staged(store) == []
    assert store.put(DATA) == blob


def test_file_is_synced_before_it_gets_its_name_and_the_name_before_anything_else(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(fd: int) -> None:
        calls.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "fsync file")
        fsync(fd)

    def watched_rename(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    store.put(DATA)
    assert calls == ["fsync file", "rename", "fsync folder"]


def stage_and_commit(store: LocalStore, digest: str, data: bytes = DATA) -> None:
    """Write a blob that must have a digest."""
    with store.stage() as staging:
        staging.write(data[:5])
        staging.write(data[5:])
        staging.commit(digest)


def test_a_block_that_fails_leaves_nothing(store: LocalStore) -> None:
    with pytest.raises(DigestMismatch, match=digest_bytes(DATA)):
        stage_and_commit(store, digest_bytes(b"other"))
    with pytest.raises(TypeError):
        stage_and_commit(store, "", DATA.decode())  # type: ignore[arg-type]
    assert staged(store) == [] and store.size(digest_bytes(DATA)) is None


def test_what_a_killed_process_left_is_swept(store: LocalStore, tmp_path: Path) -> None:
    store.stage().write(DATA)
    store.stage()
    again = LocalStore(tmp_path)
    assert again.sweep() == 2 and staged(again) == [] and again.sweep() == 0


@pytest.mark.parametrize("digest", ["sha256:" + "0" * 64, "sha256:../../../etc/passwd", "", "sha256:" + "A" * 64])
def test_what_is_not_there_is_not_found(store: LocalStore, digest: str) -> None:
    with pytest.raises(NotFound):
        store.checked_path(digest)


def test_damage_is_found_before_use_and_also_after_a_first_good_use(store: LocalStore, tmp_path: Path) -> None:
    digest = store.put(DATA).digest
    store.checked_path(digest)
    path = store.local_path(digest)
    path.chmod(0o644)
    path.write_bytes(b"X" + DATA[1:])
    for view in (store, LocalStore(tmp_path)):
        with pytest.raises(CorruptBlob, match=digest):
            view.checked_path(digest)
    store.quarantine(digest)
    assert store.size(digest) is None
    assert [file.read_bytes() for file in (tmp_path / "quarantine").iterdir()] == [b"X" + DATA[1:]]
    store.put(DATA)
    assert store.checked_path(digest).read_bytes() == DATA


def test_a_verified_blob_is_not_hashed_again(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = store.put(DATA).digest
    store.checked_path(digest)
    monkeypatch.setattr("teachercache.service.store.digest_file", lambda path: pytest.fail("hashed again"))
    store.checked_path(digest)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_our_error_and_leaves_no_torn_file(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(fd: int) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(InsufficientStorage, match="disk is full"):
            store.put(DATA)
    assert staged(store) == [] and store.size(digest_bytes(DATA)) is None
    store.put(DATA)


def test_a_disk_that_breaks_is_not_a_full_one(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="input/output error"):
        store.put(DATA)
    assert staged(store) == [] and store.size(digest_bytes(DATA)) is None


def test_a_limit_on_file_size_met_while_writing_is_a_full_disk(store: LocalStore) -> None:
    import resource
    import signal

    # the kernel's own refusal, as with a quota
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(InsufficientStorage):
            store.put(DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert staged(store) == []


def test_the_reserve_is_kept_free(tmp_path: Path) -> None:
    free = LocalStore(tmp_path).free_bytes()
    store = LocalStore(tmp_path, reserve=free + 2**30)
    with pytest.raises(InsufficientStorage, match="reserve"):
        store.put(DATA)
    assert staged(store) == []
