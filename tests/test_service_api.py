"""The API on a real server: every answer in the contract, and every wrong question."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_server import (
    MAX_LENGTH,
    VOCAB_SIZE,
    TinyServer,
    problem,
    random_examples,
    tiny_teacher,
    wait_for,
    write_examples,
)

from teachercache import __version__
from teachercache.format_spec import FORMAT_VERSION, Code, Example, RequestError, Submission, digest_bytes, digest_file

__all__ = ["tiny_teacher"]

UPLOAD_LIMIT = 200_000


@pytest.fixture(scope="module")
def server(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """A server with a tiny teacher."""
    data_dir = tmp_path_factory.mktemp("api") / "data"
    arguments = ["--teacher", f"tiny={tiny_teacher}", "--upload-limit", str(UPLOAD_LIMIT)]
    with TinyServer(data_dir, *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def data(server: TinyServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of an uploaded data set."""
    return server.upload(write_examples(tmp_path_factory.mktemp("data") / "x.parquet", random_examples(20)))


@pytest.fixture(scope="module")
def done(server: TinyServer, data: str) -> dict[str, Any]:
    """The view of a complete request with several shards."""
    return server.complete(data, k=8, tail_samples=4, shard_positions=200)


def test_what_the_server_is(server: TinyServer) -> None:
    assert server.http.get("/v1/version").json() == {"version": __version__, "format_version": FORMAT_VERSION}
    assert server.http.get("/healthz").json() == {"status": "ok"}
    ready = server.http.get("/readyz").json()
    assert ready["status"] == "ready" and {c["name"] for c in ready["checks"]} == {"database", "disk", "worker"}
    (teacher,) = server.http.get("/v1/teachers").json()["items"]
    assert teacher.pop("digest").startswith("sha256:") and teacher.pop("tokenizer").startswith("sha256:")
    assert teacher == {
        "name": "tiny",
        "vocab_size": VOCAB_SIZE,
        "max_length": MAX_LENGTH,
        "engine": "transformers",
        "dtype": "float32",
        "head_dtype": "float32",
        "tail_samples": True,
    }


def test_upload_is_201_then_200(server: TinyServer, tmp_path: Path) -> None:
    path = write_examples(tmp_path / "x.parquet", random_examples(3, seed=9))
    url = f"/v1/blobs/{digest_file(path)}"
    for status in (201, 200):
        answer = server.http.put(url, content=path.read_bytes())
        assert answer.status_code == status
        assert answer.json() == {"digest": digest_file(path), "bytes": path.stat().st_size}
    assert server.http.get(url).content == path.read_bytes()


PARQUET_LIKE = b"PAR1" + bytes(100) + b"PAR1"


@pytest.mark.parametrize(
    ("content", "digest", "status", "code"),
    [
        (b"", None, 422, "invalid_dataset"),
        (b"a,b\n1,2\n" * 10, None, 422, "invalid_dataset"),
        (PARQUET_LIKE[:-1], None, 422, "invalid_dataset"),
        (b"PAR1", None, 422, "invalid_dataset"),
        (PARQUET_LIKE, digest_bytes(b"other"), 400, "digest_mismatch"),
        (PARQUET_LIKE, "sha256:xyz", 422, "invalid_request"),
        (PARQUET_LIKE, "0" * 64, 422, "invalid_request"),
        (b"PAR1" * UPLOAD_LIMIT, None, 413, "too_large"),
    ],
)
def test_bad_uploads(server: TinyServer, content: bytes, digest: str | None, status: int, code: str) -> None:
    url = f"/v1/blobs/{digest or digest_bytes(content)}"
    answer = server.http.put(url, content=content)
    assert answer.status_code == status and problem(answer)["code"] == code
    assert server.http.get(f"/v1/blobs/{digest_bytes(content)}").status_code == 404
    # a worker may be writing a shard of an earlier test
    wait_for(lambda: None if list((server.data_dir / "staging").iterdir()) else True)


def test_an_upload_needs_its_length(server: TinyServer) -> None:
    answer = server.http.put(f"/v1/blobs/{digest_bytes(PARQUET_LIKE)}", content=iter([PARQUET_LIKE]))
    assert answer.status_code == 411 and problem(answer)["code"] == "length_required"


def test_a_chunked_body_is_cut_off_at_its_limit(server: TinyServer) -> None:
    sent = []

    def endless() -> Iterator[bytes]:
        for _ in range(10_000):
            sent.append(1)
            yield b"x" * 65536

    answer = server.http.post("/v1/requests", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413 and problem(answer)["code"] == "too_large"
    assert len(sent) < 1000


def test_an_upload_that_breaks_off_leaves_nothing(server: TinyServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"PUT /v1/blobs/{digest_bytes(PARQUET_LIKE)} HTTP/1.1\r\nHost: x\r\nContent-Length: 108\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + PARQUET_LIKE[:50])
    # the next answer comes after the broken one was dealt with
    assert server.http.get(f"/v1/blobs/{digest_bytes(PARQUET_LIKE)}").status_code == 404
    staging = server.data_dir / "staging"
    for _ in range(100):
        if not list(staging.iterdir()):
            break
        server.http.get("/healthz")
    assert list(staging.iterdir()) == []


def test_ranges_and_conditions(server: TinyServer, data: str) -> None:
    url, etag = f"/v1/blobs/{data}", f'"{data}"'
    whole = server.http.get(url)
    assert whole.status_code == 200 and digest_bytes(whole.content) == data
    assert whole.headers["etag"] == etag and whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert "content-encoding" not in whole.headers
    head = server.http.head(url)
    assert head.status_code == 200 and head.content == b""
    same = ("etag", "content-length", "content-type", "accept-ranges", "cache-control")
    assert all(head.headers[name] == whole.headers[name] for name in same)
    size = len(whole.content)
    for asked, begin, end in (
        ("0-3", 0, 4),
        (f"{size - 5}-", size - 5, size),
        ("-7", size - 7, size),
        ("5-999999999", 5, size),
    ):
        part = server.http.get(url, headers={"range": f"bytes={asked}"})
        assert part.status_code == 206 and part.content == whole.content[begin:end]
        assert part.headers["content-range"] == f"bytes {begin}-{end - 1}/{size}" and part.headers["etag"] == etag
    assert server.http.head(url, headers={"range": "bytes=0-3"}).headers["content-length"] == "4"
    for tags in (etag, f"W/{etag}", f'"x", {etag}', "*"):
        cached = server.http.get(url, headers={"if-none-match": tags})
        assert cached.status_code == 304 and cached.content == b"" and cached.headers["etag"] == etag
    assert server.http.get(url, headers={"if-none-match": '"x"'}).status_code == 200
    assert server.http.get(url, headers={"range": "bytes=0-3", "if-range": etag}).status_code == 206
    assert server.http.get(url, headers={"range": "bytes=0-3", "if-range": '"x"'}).status_code == 200
    for nonsense in ("bytes=x-y", "lines=1-2", "bytes"):
        assert server.http.get(url, headers={"range": nonsense}).status_code == 200
    outside = server.http.get(url, headers={"range": f"bytes={size}-"})
    assert outside.status_code == 416 and outside.headers["content-range"] == f"bytes */{size}"
    assert problem(outside)["code"] == "range_not_satisfiable"


def test_a_manifest_is_served_byte_for_byte_under_both_names(server: TinyServer, done: dict[str, Any]) -> None:
    newest = server.http.get(f"/v1/requests/{done['id']}/manifest")
    assert newest.status_code == 200 and newest.headers["content-type"] == "application/json"
    assert newest.headers["content-location"] == f"/v1/manifests/{done['manifest']}"
    assert newest.headers["etag"] == f'"{done["manifest"]}"' and newest.headers["cache-control"] == "no-cache"
    fixed = server.http.get(newest.headers["content-location"])
    assert fixed.content == newest.content and digest_bytes(fixed.content) == done["manifest"]
    assert fixed.headers["cache-control"].endswith("immutable")
    for url in (f"/v1/requests/{done['id']}/manifest", f"/v1/manifests/{done['manifest']}"):
        assert server.http.head(url).headers["content-length"] == str(len(fixed.content))
        assert server.http.get(url, headers={"if-none-match": fixed.headers["etag"]}).status_code == 304
        assert server.http.get(url, headers={"range": "bytes=0-0"}).content == b"{"


def test_a_view_tells_the_whole_story(server: TinyServer, done: dict[str, Any], data: str) -> None:
    spec = done["request"]
    assert spec["data"] == data and (spec["k"], spec["tail_samples"], spec["seed"]) == (8, 4, 0)
    assert (done["state"], done["error"], done["eta_s"]) == ("complete", None, None)
    assert done["sequences"] == 20 and done["shards_total"] == done["shards_done"] > 2
    assert done["positions_total"] == done["positions_done"] == done["teacher_tokens_scored"]
    assert done["tokens_per_s"] > 0 and done["teacher_name"] == "tiny"
    for name in ("created_at", "updated_at"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", done[name])
    answer = server.http.get(f"/v1/requests/{done['id']}")
    assert answer.json() == done
    again = server.http.get(f"/v1/requests/{done['id']}", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304


def test_requests_are_listed_newest_first_in_pages(server: TinyServer, data: str, done: dict[str, Any]) -> None:
    ids = [done["id"], *(server.submit(data, seed=seed, k=1).json()["id"] for seed in range(3))]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = server.http.get("/v1/requests", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        assert len(page["items"]) <= 2
        found += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    positions = [found.index(request_id) for request_id in ids]
    assert positions == sorted(positions, reverse=True) and len(set(found)) == len(found)


NOWHERE = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("change", "status", "code", "words"),
    [
        ({"teacher": "big"}, 404, "unknown_teacher", "it serves ['tiny']"),
        ({"teacher": NOWHERE}, 404, "unknown_teacher", NOWHERE),
        ({"data": NOWHERE}, 404, "not_found", f"upload it with PUT /v1/blobs/{NOWHERE}"),
        ({"data": "x.parquet"}, 422, "invalid_request", "x.parquet"),
        ({"k": 0}, 422, "k_out_of_range", "not 0"),
        (
            {"k": VOCAB_SIZE + 1},
            422,
            "k_out_of_range",
            f"k {VOCAB_SIZE + 1} is above the teacher's vocabulary of {VOCAB_SIZE}",
        ),
        ({"k": 4097}, 422, "k_out_of_range", "4096"),
        ({"k": 1.5}, 422, "k_out_of_range", "1.5"),
        ({"k": None}, 422, "k_out_of_range", "None"),
        ({"tail_samples": -1}, 422, "invalid_request", "tail_samples"),
        ({"seed": 2**53}, 422, "invalid_request", "seed"),
        ({"profile": "fp64"}, 422, "invalid_request", "fp64"),
        ({"shard_positions": 0}, 422, "invalid_request", "shard_positions"),
        ({"engine": "vllm"}, 422, "invalid_request", "'vllm' is not what this server runs"),
        ({"dtype": "float16"}, 422, "invalid_request", "'float16' is not what this server runs"),
        ({"temperature": 2}, 422, "invalid_request", "unknown keys ['temperature']"),
        ({"teacher": 5}, 422, "invalid_request", "teacher"),
    ],
)
def test_bad_submissions(
    server: TinyServer, data: str, change: dict[str, Any], status: int, code: str, words: str
) -> None:
    before = server.http.get("/v1/requests").json()["items"]
    body = {"teacher": "tiny", "data": data, **change}
    for url in ("/v1/requests", "/v1/requests?dry_run=true"):
        answer = server.http.post(url, json=body)
        assert answer.status_code == status, answer.text
        assert problem(answer)["code"] == code and words in problem(answer)["detail"]
    assert [item["id"] for item in server.http.get("/v1/requests").json()["items"]] == [item["id"] for item in before]


@pytest.mark.parametrize(
    ("content", "media_type", "status", "code"),
    [
        (b"", "application/json", 400, "invalid_json"),
        (b"{", "application/json", 400, "invalid_json"),
        (b"\xff\xfe\x00", "application/json", 400, "invalid_json"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 422, "invalid_request"),
        (b"{}", "application/json; charset=utf-8", 422, "invalid_request"),
        (b"{}", "", 415, "unsupported_media_type"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"a=b", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b" " * (2**20 + 1), "application/json", 413, "too_large"),
    ],
)
def test_bad_bodies(server: TinyServer, content: bytes, media_type: str, status: int, code: str) -> None:
    answer = server.http.post("/v1/requests", content=content, headers={"content-type": media_type})
    assert answer.status_code == status and problem(answer)["code"] == code


@pytest.mark.parametrize(
    ("method", "url", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", f"/v1/requests/{'0' * 64}", 404, "not_found"),
        ("GET", "/v1/requests/..%2f..%2fmeta.db", 404, "not_found"),
        ("GET", f"/v1/requests/{'0' * 64}/manifest", 404, "not_found"),
        ("POST", f"/v1/requests/{'0' * 64}/retry", 404, "not_found"),
        ("GET", f"/v1/blobs/{NOWHERE}", 404, "not_found"),
        ("GET", "/v1/blobs/..%2f..%2fmeta.db", 404, "not_found"),
        ("GET", "/v1/blobs/sha256:..", 404, "not_found"),
        ("GET", f"/v1/manifests/{NOWHERE}", 404, "not_found"),
        ("DELETE", f"/v1/blobs/{NOWHERE}", 405, "method_not_allowed"),
        ("PUT", "/v1/requests", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
        ("GET", "/v1/requests?limit=0", 422, "invalid_request"),
        ("GET", "/v1/requests?limit=many", 422, "invalid_request"),
        ("GET", "/v1/requests?cursor=-1", 422, "invalid_request"),
        ("GET", f"/v1/requests?cursor={'9' * 30}", 422, "invalid_request"),
        ("POST", "/v1/requests?dry_run=perhaps", 422, "invalid_request"),
    ],
)
def test_paths_that_lead_nowhere(server: TinyServer, method: str, url: str, status: int, code: str) -> None:
    answer = server.http.request(method, url)
    assert answer.status_code == status and problem(answer)["code"] == code


def test_blobs_are_no_manifests(server: TinyServer, data: str) -> None:
    assert server.http.get(f"/v1/manifests/{data}").status_code == 404


def test_only_failed_requests_are_retried(server: TinyServer, done: dict[str, Any]) -> None:
    answer = server.http.post(f"/v1/requests/{done['id']}/retry")
    assert answer.status_code == 409 and problem(answer)["code"] == "job_failed"


def test_a_bad_data_set_fails_its_request_with_the_sequence_named(server: TinyServer, tmp_path: Path) -> None:
    cases = [
        ([1, VOCAB_SIZE], "token_out_of_vocabulary", "sequence 1 has token id 300 at position 1"),
        ([1], "sequence_too_short", "sequence 1 has 1 tokens"),
        ([1] * (MAX_LENGTH + 1), "sequence_too_long", "sequence 1 has 65 tokens"),
    ]
    for number, (ids, code, words) in enumerate(cases):
        examples = [Example(input_ids=np.array([1, 2])), Example(input_ids=np.array(ids))]
        data = server.upload(write_examples(tmp_path / f"{number}.parquet", examples))
        sized = server.http.post("/v1/requests?dry_run=true", json={"teacher": "tiny", "data": data})
        assert sized.status_code == 422 and problem(sized)["code"] == code and words in problem(sized)["detail"]
        posted = server.submit(data)
        assert posted.status_code == 202
        view = server.wait(posted.json()["id"])
        assert view["state"] == "failed" and view["error"]["code"] == code and words in view["error"]["detail"]
        assert view["teacher_tokens_scored"] == 0
        answer = server.http.get(f"/v1/requests/{view['id']}/manifest")
        assert (
            answer.status_code == 409 and problem(answer)["code"] == "job_failed" and words in problem(answer)["detail"]
        )
        # the same request is the same failure, until it is asked to be tried again
        again = server.submit(data)
        assert (again.status_code, again.json()["state"], again.json()["created"]) == (200, "failed", False)
        assert server.http.post(f"/v1/requests/{view['id']}/retry").status_code == 202
        assert server.wait(view["id"])["error"]["code"] == code


def test_parquet_that_is_no_data_set_fails_its_request(server: TinyServer, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "columns.parquet")
    (tmp_path / "damaged.parquet").write_bytes(PARQUET_LIKE)
    for name in ("columns.parquet", "damaged.parquet"):
        data = server.upload(tmp_path / name)
        sized = server.http.post("/v1/requests?dry_run=true", json={"teacher": "tiny", "data": data})
        assert sized.status_code == 422 and problem(sized)["code"] == "invalid_dataset"
        view = server.wait(server.submit(data).json()["id"])
        assert view["state"] == "failed" and view["error"]["code"] == "invalid_dataset"


def test_an_engine_that_cannot_draw_is_asked_for_no_tail_samples(server: TinyServer) -> None:
    (item,) = server.http.get("/v1/teachers").json()["items"]
    what: dict[str, Any] = {"vocab_size": 300, "engine": "plain", "dtype": "float32", "head_dtype": "float32"}
    ask = Submission(teacher="tiny", data=NOWHERE, tail_samples=4)
    with pytest.raises(RequestError, match="'plain' cannot draw tail samples") as failure:
        ask.resolve(teacher=item["digest"], draws_tail_samples=False, **what)
    assert failure.value.code is Code.TAIL_SAMPLES_UNAVAILABLE and failure.value.code.status == 422
    auto = Submission(teacher="tiny", data=NOWHERE).resolve(teacher=item["digest"], draws_tail_samples=False, **what)
    assert auto.tail_samples == 0
