"""fsck finds each kind of fault and nothing else, and repairs what can be made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_engine import Bench, FakeEngine, newest

from teachercache.cli import main
from teachercache.service.data_dir import ServerLock
from teachercache.service.fsck import fsck


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A complete cache."""
    bench = Bench(tmp_path)
    bench.submit()
    work(bench)
    return bench


def work(bench: Bench) -> None:
    worker = bench.worker(FakeEngine())
    while worker.step():
        pass


def damage(bench: Bench, digest: str) -> None:
    path = bench.store.local_path(digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_nothing_is_wrong_with_what_nobody_touched(bench: Bench) -> None:
    found = fsck(bench.store, bench.meta)
    # the upload, its tokens, three shards, three manifests
    assert found.is_sound and found.checked == 8
    assert not (found.lost or found.damaged or found.orphans or found.unfinished or found.quarantined)
    assert found.bytes == sum(bench.meta.blobs().values())


def test_each_fault_is_told_and_mended(bench: Bench) -> None:
    before = newest(bench)
    first, second = before.shards[0].digest, before.shards[1].digest
    damage(bench, first)
    bench.store.local_path(second).unlink()
    orphan = bench.store.put(b"nobody names it").digest
    (bench.store.staging / "x.part").write_bytes(b"half")
    found = fsck(bench.store, bench.meta)
    assert not found.is_sound
    assert (found.damaged, found.lost, found.orphans) == ([first], [second], [orphan])
    assert found.unfinished == ["x.part"] and found.quarantined == []
    # to look changes nothing
    assert bench.row().state == "complete" and bench.store.size(orphan) is not None

    mended = fsck(bench.store, bench.meta, repair=True)
    assert mended.is_sound and mended.quarantined == [first[7:]]
    assert bench.store.size(orphan) is None and not list(bench.store.staging.iterdir())
    bench.meta.retry(bench.spec.id)
    work(bench)
    assert bench.row().state == "complete" and newest(bench).shards == before.shards
    again = fsck(bench.store, bench.meta)
    assert again.is_sound and not (again.lost or again.damaged or again.orphans)


@pytest.mark.parametrize("kind", ["tokens", "manifest"])
def test_what_shards_come_from_and_what_names_them_is_made_again(bench: Bench, kind: str) -> None:
    row, before = bench.row(), newest(bench)
    digest = row.tokens if kind == "tokens" else row.manifest
    assert digest is not None
    damage(bench, digest)
    assert fsck(bench.store, bench.meta).damaged == [digest]
    fsck(bench.store, bench.meta, repair=True)
    work(bench)
    assert fsck(bench.store, bench.meta).is_sound and newest(bench) == before


def test_the_command(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(bench.settings.data_dir)]
    assert main(["fsck", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["checked"] == 8
    damage(bench, newest(bench).shards[2].digest)
    assert main(["fsck", *where]) == 6
    assert f"damaged: {newest(bench).shards[2].digest}" in capsys.readouterr().out
    assert main(["fsck", "--repair", *where]) == 0
    with ServerLock(bench.settings.data_dir):
        assert main(["fsck", *where]) == 2
    assert "already served" in capsys.readouterr().err
