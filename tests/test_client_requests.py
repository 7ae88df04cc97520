"""Asking for caches: upload, submit, wait, list, fetch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty_server import Cache, FaultyServer, cut_after, make_cache, refuse, send

from teachercache.client import (
    BadAnswer,
    CacheIncomplete,
    CacheNotFound,
    Client,
    ConfigError,
    IntegrityError,
    OfflineMiss,
    RequestFailed,
    RequestView,
    ServerError,
    WaitTimeout,
)
from teachercache.client.upload import as_parquet
from teachercache.format_spec import (
    Code,
    DatasetError,
    Example,
    ManifestError,
    RequestError,
    Submission,
    digest_bytes,
    digest_file,
    write_dataset,
)

CACHE = make_cache()
NOBODY = "0" * 64


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer().running() as running:
        yield running


@pytest.fixture
def client(server: FaultyServer, tmp_path: Path) -> Iterator[Client]:
    with Client(server.url, cache_dir=tmp_path / "cache", retry_s=5.0) as made:
        yield made


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(50)))
    return path


def test_jsonl_is_uploaded_as_parquet(server: FaultyServer, client: Client, jsonl: Path, tmp_path: Path) -> None:
    digest = client.upload(jsonl)
    write_dataset(tmp_path / "same.parquet", [Example(text=f"line {i}") for i in range(50)])
    assert digest == digest_file(tmp_path / "same.parquet")
    assert server.blobs[digest] == (tmp_path / "same.parquet").read_bytes()


def test_known_data_is_not_sent_again(server: FaultyServer, client: Client, jsonl: Path) -> None:
    assert client.upload(jsonl) == client.upload(str(jsonl))
    assert [method for method, *_ in server.log] == ["HEAD", "PUT", "HEAD"]


def test_upload_survives_a_busy_server(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    write_dataset(path, [Example(input_ids=np.arange(300)) for _ in range(2000)])
    server.fail("PUT", "/v1/blobs", refuse(Code.UNAVAILABLE), lambda handler: handler.hang_up())
    assert server.blobs[client.upload(path)] == path.read_bytes()
    assert all(headers["Content-Length"] == str(path.stat().st_size) for m, _, headers in server.log if m == "PUT")


def test_full_server(server: FaultyServer, client: Client, jsonl: Path) -> None:
    server.fail("PUT", "/v1/blobs", refuse(Code.INSUFFICIENT_STORAGE))
    with pytest.raises(ServerError) as caught:
        client.upload(jsonl)
    assert caught.value.code is Code.INSUFFICIENT_STORAGE


def test_bad_line_is_named(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    bad = ('{"text": 7}', '{"text": "\\ud800"}', '{"text": "a", "input_ids": [1]}', "[1]", '{"text": "cut')
    for line in bad:
        path.write_text(f'{{"text": "good"}}\n{line}\n')
        with pytest.raises(DatasetError, match=r"bad\.jsonl line 2"):
            client.upload(path)


def test_bad_files(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        client.upload(tmp_path / "missing.jsonl")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DatasetError, match="not a Parquet file"):
        client.upload(tmp_path / "cut.parquet")
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    with pytest.raises(DatasetError, match="noise line 1 is not JSON"):
        client.upload(tmp_path / "noise")
    assert server.log == []


def test_same_request_is_the_same_cache(client: Client) -> None:
    data = digest_bytes(b"data")
    first = client.submit(teacher="tiny", data=data, k=5)
    second = client.submit(Submission(teacher="tiny", data=data, k=5))
    assert (first.created, second.created, first.state) == (True, False, "queued")
    assert first.id == second.id == client.status(first.id).id
    assert client.submit(teacher="tiny", data=data, k=6).id != first.id
    cut = client.submit(teacher="tiny", data=data, k=5, min_prob=1e-4)
    assert (cut.request["min_prob"], cut.created, first.request["min_prob"]) == ("0.0001", True, "0")
    assert client.submit(teacher="tiny", data=data, k=5, min_prob="0.00010").id == cut.id != first.id


def test_bad_submission_is_not_sent(server: FaultyServer, client: Client) -> None:
    with pytest.raises(RequestError, match="k must be"):
        client.submit(teacher="tiny", data=digest_bytes(b""), k=0)
    with pytest.raises(RequestError, match="min_prob must be a decimal from 0 to below 1"):
        client.submit(teacher="tiny", data=digest_bytes(b""), min_prob=1.0)
    with pytest.raises(RequestError, match="unknown keys"):
        client.submit(teacher="tiny", data=digest_bytes(b""), temperature=1)
    with pytest.raises(ConfigError, match="not both"):
        client.submit(Submission("tiny", digest_bytes(b"")), k=3)
    assert server.log == []


def test_estimate_makes_nothing(client: Client) -> None:
    data = digest_bytes(b"data")
    estimate = client.estimate(teacher="tiny", data=data)
    assert (estimate.sequences, estimate.positions, estimate.exists) == (9, 90, False)
    assert list(client.ls()) == []
    assert client.submit(teacher="tiny", data=data).id == estimate.id
    assert client.estimate(teacher="tiny", data=data).exists


def test_teachers(client: Client) -> None:
    (teacher,) = client.teachers()
    assert (teacher.name, teacher.vocab_size, teacher.tail_samples) == ("tiny", 1000, True)


def test_list_turns_pages(client: Client) -> None:
    made = [client.submit(teacher="tiny", data=digest_bytes(b"data"), k=k).id for k in range(1, 6)]
    assert [view.id for view in client.ls()] == made[::-1]


def test_newer_and_stranger_servers(server: FaultyServer, client: Client) -> None:
    server.add(CACHE)
    server.views[CACHE.id]["colour"] = "new in version 9"
    assert client.status(CACHE.id).state == "complete"
    del server.views[CACHE.id]["state"]
    with pytest.raises(BadAnswer, match=r"RequestView lacks .*'state'"):
        client.status(CACHE.id)
    server.fail("GET", "/v1/teachers", send(200, b"[]"))
    with pytest.raises(BadAnswer, match="without items"):
        client.teachers()


def test_wait_shows_progress(server: FaultyServer, client: Client) -> None:
    server.add(CACHE, shards=1)
    seen: list[RequestView] = []

    def watch(view: RequestView) -> None:
        seen.append(view)
        server.add(CACHE, shards=2) if len(seen) == 1 else server.add(CACHE)

    view = client.wait(CACHE.id, on_progress=watch)
    assert [view.shards_done for view in seen] == [1, 2, 3]
    assert (view.state, view.manifest) == ("complete", CACHE.manifest.digest)


def test_wait_ends(server: FaultyServer, client: Client) -> None:
    server.add(CACHE, shards=1)
    with pytest.raises(WaitTimeout, match=r"is running after 0\.2 s"):
        client.wait(CACHE.id, timeout_s=0.2)
    server.fail_request(CACHE)
    with pytest.raises(RequestFailed, match=r"the engine died \(internal\)") as caught:
        client.wait(CACHE.id)
    assert (caught.value.reason, caught.value.code) == ("internal", Code.JOB_FAILED)


def test_retry_of_a_failed_request(server: FaultyServer, client: Client) -> None:
    server.add(CACHE, shards=1)
    with pytest.raises(ServerError) as caught:
        client.retry(CACHE.id)
    assert caught.value.status == 409
    server.fail_request(CACHE)
    assert client.retry(CACHE.id).state == "queued"


def test_unknown_names(client: Client) -> None:
    for ask in (client.status, client.wait, client.retry, client.manifest):
        with pytest.raises(CacheNotFound, match=f"the server has no {NOBODY}"):
            ask(NOBODY)
    with pytest.raises(CacheNotFound):
        client.manifest("sha256:" + NOBODY)
    with pytest.raises(ConfigError, match="64 hex digits, not 'abc'"):
        client.status("abc")


def test_manifest_by_request_and_digest(server: FaultyServer, client: Client) -> None:
    server.add(CACHE, shards=0)
    with pytest.raises(CacheIncomplete, match="no shard yet"):
        client.manifest(CACHE.id)
    server.add(CACHE, shards=2)
    assert client.manifest(CACHE.id) == CACHE.partial(2)
    server.add(CACHE)
    assert client.manifest(CACHE.id) == CACHE.manifest
    asked = len(server.log)
    assert client.manifest(CACHE.manifest.digest) == CACHE.manifest
    assert len(server.log) == asked


def test_manifest_of_a_failed_request(server: FaultyServer, client: Client) -> None:
    server.add(CACHE, shards=0)
    server.fail_request(CACHE)
    with pytest.raises(RequestFailed, match="the engine died"):
        client.manifest(CACHE.id)


def test_wrong_manifests(server: FaultyServer, client: Client) -> None:
    other = make_cache(seed=1)
    server.add(CACHE)
    data = CACHE.manifest.to_bytes()
    server.fail("GET", "manifest", send(200, other.manifest.to_bytes()), send(200, data[:-9]))
    with pytest.raises(IntegrityError, match=f"manifest of request {other.id}, not of {CACHE.id}"):
        client.manifest(CACHE.id)
    with pytest.raises(ManifestError):
        client.manifest(CACHE.id)
    server.fail("GET", "/v1/manifests", send(200, other.manifest.to_bytes()))
    with pytest.raises(IntegrityError, match="another manifest"):
        client.manifest(CACHE.manifest.digest)


def test_offline_manifest(server: FaultyServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add(CACHE)
    client.manifest(CACHE.id)
    asked = len(server.log)
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", "1")
    assert client.manifest(CACHE.id) == client.manifest(CACHE.manifest.digest) == CACHE.manifest
    for name in (NOBODY, "sha256:" + NOBODY):
        with pytest.raises(OfflineMiss):
            client.manifest(name)
    assert len(server.log) == asked


def check_directory(directory: Path, cache: Cache) -> None:
    assert (directory / "manifest.json").read_bytes() == cache.manifest.to_bytes()
    files = {path.name: path.read_bytes() for path in (directory / "shards").iterdir()}
    assert files == {f"{digest_bytes(blob)[7:]}.tkc": blob for blob in cache.blobs}


def test_pull(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    server.add(CACHE)
    seen: list[tuple[int, int]] = []
    assert client.pull(CACHE.id, tmp_path / "out", lambda *done: seen.append(done)) == CACHE.manifest
    check_directory(tmp_path / "out", CACHE)
    assert seen == sorted(seen)
    assert seen[-1] == (CACHE.manifest.num_bytes, CACHE.manifest.num_bytes)


def test_pull_goes_on_where_it_was(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    """A sound shard stays, a damaged one is fetched again, the manifest comes last."""
    server.add(CACHE)
    server.fail("GET", f"/v1/blobs/{CACHE.manifest.shards[2].digest}", refuse(Code.CORRUPT))
    with pytest.raises(ServerError):
        client.pull(CACHE.id, tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    damaged = tmp_path / "shards" / f"{CACHE.manifest.shards[1].digest[7:]}.tkc"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    client.pull(CACHE.manifest.digest, tmp_path)
    check_directory(tmp_path, CACHE)
    counts = [server.count("GET", f"/v1/blobs/{shard.digest}") for shard in CACHE.manifest.shards]
    assert counts == [1, 2, 2]


def test_pull_through_a_broken_connection(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    server.add(CACHE)
    server.fail("GET", "/v1/blobs", cut_after(100), cut_after(100))
    client.pull(CACHE.id, tmp_path)
    check_directory(tmp_path, CACHE)


def test_pull_sweeps_what_a_killed_one_left(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    server.add(CACHE)
    left = tmp_path / "shards" / "some.tkc.1.abc.part"
    left.parent.mkdir()
    left.touch()
    os.utime(left, (0, 0))
    client.pull(CACHE.id, tmp_path)
    check_directory(tmp_path, CACHE)


def test_pull_of_an_unfinished_cache(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    server.add(CACHE, shards=2)
    with pytest.raises(CacheIncomplete, match=f"wait for request {CACHE.id}"):
        client.pull(CACHE.id, tmp_path)
    server.fail_request(CACHE)
    with pytest.raises(RequestFailed):
        client.pull(CACHE.id, tmp_path)


def test_pull_into_another_cache(server: FaultyServer, client: Client, tmp_path: Path) -> None:
    other = make_cache(seed=1)
    server.add(CACHE)
    server.add(other)
    client.pull(CACHE.id, tmp_path)
    with pytest.raises(ConfigError, match=f"holds another cache, of request {CACHE.id}"):
        client.pull(other.id, tmp_path)
    check_directory(tmp_path, CACHE)


def test_manifest_for_another_cache_in_the_local_cache(client: Client) -> None:
    """A file under a request's name that is another request's manifest is not believed."""
    client.cache.add_manifest(CACHE.manifest)
    path = client.cache.root / "manifests" / f"request-{CACHE.id}.json"
    path.write_bytes(make_cache(seed=1).manifest.to_bytes())
    assert client.cache.manifest_of(CACHE.id) is None


@pytest.mark.parametrize("content", [b"", b"hello", b'{"text": "a"}\n'])
def test_a_file_that_calls_itself_parquet_is_judged_as_that(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="not a Parquet file"), as_parquet(path):
        pass
