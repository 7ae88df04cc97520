"""The local cache: verified, shared, limited."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_server import FaultyServer, Handler, make_cache, send

from teachercache.client import CacheUnusable, OfflineMiss, claim
from teachercache.client.blobs import BlobCache, default_cache_dir
from teachercache.client.transport import Transport

CACHE = make_cache((3, 4, 2, 2))
SHARDS = CACHE.manifest.shards


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer().running() as running:
        running.add(CACHE)
        yield running


@pytest.fixture
def transport(server: FaultyServer) -> Iterator[Transport]:
    made = Transport(server.url, retry_s=5.0)
    yield made
    made.close()


def test_second_use_costs_no_request(server: FaultyServer, transport: Transport, tmp_path: Path) -> None:
    blobs = BlobCache(tmp_path)
    path = blobs.get(SHARDS[0], transport)
    assert path.read_bytes() == CACHE.blobs[0]
    assert path == tmp_path / "blobs" / "sha256" / SHARDS[0].digest[7:9] / SHARDS[0].digest[7:]
    assert BlobCache(tmp_path).get(SHARDS[0], transport) == path
    assert len(server.log) == 1
    assert (tmp_path / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert list((tmp_path / "parts").iterdir()) == []


def test_truncated_file_is_fetched_again(server: FaultyServer, transport: Transport, tmp_path: Path) -> None:
    blobs = BlobCache(tmp_path)
    path = blobs.get(SHARDS[0], transport)
    path.write_bytes(path.read_bytes()[:-1])
    assert blobs.get(SHARDS[0], transport).read_bytes() == CACHE.blobs[0]
    assert len(server.log) == 2


def test_longest_unused_goes(transport: Transport, tmp_path: Path) -> None:
    blobs = BlobCache(tmp_path, limit_bytes=sum(shard.bytes for shard in SHARDS[:3]))
    for shard in SHARDS[:3]:
        blobs.get(shard, transport)
    for age, shard in ((30, SHARDS[0]), (20, SHARDS[1]), (10, SHARDS[2])):
        os.utime(blobs.path(shard.digest), (time.time() - age,) * 2)
    blobs.get(SHARDS[0], transport)
    blobs.get(SHARDS[3], transport)
    assert [blobs.path(shard.digest).exists() for shard in SHARDS] == [True, False, True, True]


def test_only_fetched_files_can_go(transport: Transport, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    blobs = BlobCache(tmp_path, limit_bytes=max(shard.bytes for shard in SHARDS))
    for shard in SHARDS:
        blobs.get(shard, transport)
    assert (tmp_path / "thesis.txt").exists()
    assert blobs.path(SHARDS[3].digest).exists()
    assert not blobs.path(SHARDS[2].digest).exists()


def test_limit_below_a_shard_is_told_first(server: FaultyServer, transport: Transport, tmp_path: Path) -> None:
    with pytest.raises(CacheUnusable, match=f"needs {SHARDS[0].bytes} bytes of local cache"):
        BlobCache(tmp_path, limit_bytes=10).get(SHARDS[0], transport)
    assert server.log == []


def test_offline(server: FaultyServer, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BlobCache(tmp_path).get(SHARDS[0], transport)
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", "1")
    assert BlobCache(tmp_path).get(SHARDS[0], transport).read_bytes() == CACHE.blobs[0]
    with pytest.raises(OfflineMiss, match=f"lacks shard {SHARDS[1].digest}"):
        BlobCache(tmp_path).get(SHARDS[1], transport)
    assert len(server.log) == 1


def test_many_at_once_fetch_once(server: FaultyServer, transport: Transport, tmp_path: Path) -> None:
    def slowly(handler: Handler) -> None:
        time.sleep(0.3)
        send(200, CACHE.blobs[0])(handler)

    server.fail("GET", "/v1/blobs", slowly)
    threads = [threading.Thread(target=BlobCache(tmp_path).get, args=(SHARDS[0], transport)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.log) == 1
    assert list((tmp_path / "parts").iterdir()) == []


def test_claim_of_the_dead_is_taken_over(
    server: FaultyServer, transport: Transport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "STALE_S", 0.2)
    left = tmp_path / "parts" / f"{SHARDS[0].digest[7:]}.claim"
    left.parent.mkdir()
    left.touch()
    assert BlobCache(tmp_path).get(SHARDS[0], transport).read_bytes() == CACHE.blobs[0]
    assert not left.exists()


def test_old_parts_are_swept(transport: Transport, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, age in (("old.part", 2 * 24 * 3600), ("new.part", 60)):
        (parts / name).touch()
        os.utime(parts / name, (time.time() - age,) * 2)
    BlobCache(tmp_path).get(SHARDS[0], transport)
    assert [path.name for path in parts.iterdir()] == ["new.part"]


def test_folder_that_cannot_be(transport: Transport, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheUnusable, match="cannot use the local cache"):
        BlobCache(tmp_path / "file").get(SHARDS[0], transport)


def test_manifests_are_kept_by_digest_and_request(tmp_path: Path) -> None:
    blobs = BlobCache(tmp_path)
    assert blobs.manifest(CACHE.manifest.digest) is None
    assert blobs.manifest_of(CACHE.id) is None
    blobs.add_manifest(CACHE.manifest)
    assert blobs.manifest(CACHE.manifest.digest) == CACHE.manifest
    assert blobs.manifest_of(CACHE.id) == CACHE.manifest
    for path in (tmp_path / "manifests").iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    assert blobs.manifest(CACHE.manifest.digest) is None
    assert blobs.manifest_of(CACHE.id) is None


def test_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEACHERCACHE_CACHE_DIR", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("TEACHERCACHE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "teachercache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "teachercache"
