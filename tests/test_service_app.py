"""States that a server is rarely in: draining, out of space, broken."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import Bench, FakeEngine, newest
from prometheus_client.parser import text_string_to_metric_families
from tiny_server import TinyServer, problem

from teachercache.format_spec import digest_bytes
from teachercache.service.app import create_app
from teachercache.service.state import State
from teachercache.service.store import LocalStore
from teachercache.service.supervisor import Supervisor
from teachercache.service.teachers import Teachers

UPLOAD = b"PAR1" + bytes(100) + b"PAR1"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A data directory with a data set."""
    return Bench(tmp_path)


@pytest.fixture
def state(bench: Bench) -> State:
    """The parts of a server whose supervisor was never started."""
    teachers = Teachers.of(bench.settings, bench.meta.file_digest)
    supervisor = Supervisor(["false"], bench.root / "worker.log", bench.meta)
    return State(bench.settings, bench.store, bench.meta, teachers, supervisor)


def ask(state: State, method: str, url: str, **options: Any) -> httpx.Response:
    """Send one request to the app."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, url, **options)

    return asyncio.run(send())


def test_a_server_that_drains_takes_no_work(state: State, bench: Bench) -> None:
    body = {"teacher": "fake", "data": bench.data}
    state.supervisor.drain()
    bench.submit()
    for method, url, options in (
        ("POST", "/v1/requests", {"json": body}),
        ("POST", f"/v1/requests/{bench.spec.id}/retry", {}),
    ):
        answer = ask(state, method, url, **options)
        assert answer.status_code == 503 and problem(answer)["code"] == "draining" and problem(answer)["retryable"]
        assert int(answer.headers["retry-after"]) > 0
    assert len(bench.meta.requests(10)) == 1


def test_a_full_disk_refuses_uploads_and_still_serves(state: State, bench: Bench) -> None:
    reserve = bench.store.free_bytes() + 2**40
    full = State(
        state.settings, LocalStore(bench.settings.data_dir, reserve), bench.meta, state.teachers, state.supervisor
    )
    answer = ask(full, "PUT", f"/v1/blobs/{digest_bytes(UPLOAD)}", content=UPLOAD)
    assert answer.status_code == 507 and problem(answer)["code"] == "insufficient_storage"
    assert ask(full, "GET", f"/v1/blobs/{bench.data}").status_code == 200
    ready = ask(full, "GET", "/readyz")
    assert ready.status_code == 503 and problem(ready)["code"] == "unavailable" and "disk" in problem(ready)["detail"]
    checks = {check["name"]: check["ok"] for check in ready.json()["checks"]}
    assert checks["disk"] is False and checks["database"] is True


def test_a_fault_of_ours_is_a_problem_without_its_secrets(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("the password is 1234")

    monkeypatch.setattr(state.meta, "requests", fail)
    answer = ask(state, "GET", "/v1/requests")
    assert answer.status_code == 500 and problem(answer)["code"] == "internal" and "1234" not in answer.text


def test_an_intact_upload_is_not_stored_again_and_a_damaged_one_is(state: State, bench: Bench) -> None:
    path = bench.store.local_path(bench.data)
    content = path.read_bytes()
    assert ask(state, "PUT", f"/v1/blobs/{bench.data}", content=content).status_code == 200
    path.chmod(0o644)
    path.write_bytes(content[:-1] + b"X")
    assert ask(state, "PUT", f"/v1/blobs/{bench.data}", content=content).status_code == 201
    assert ask(state, "GET", f"/v1/blobs/{bench.data}").content == content


def test_a_data_set_that_is_gone_is_asked_for(state: State, bench: Bench) -> None:
    bench.store.local_path(bench.data).unlink()
    answer = ask(state, "GET", f"/v1/blobs/{bench.data}")
    assert answer.status_code == 500 and problem(answer)["code"] == "corrupt"
    answer = ask(state, "POST", "/v1/requests", json={"teacher": "fake", "data": bench.data})
    assert answer.status_code == 404 and "upload it with PUT" in problem(answer)["detail"]


def test_metrics_have_few_labels_and_true_sums(state: State, bench: Bench) -> None:
    """Counts of answers by route, never by path; tokens and bytes of what was made."""
    bench.submit()
    worker = bench.worker(FakeEngine())
    while worker.step():
        pass

    async def ask_all() -> str:
        transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for name in ("a", "b"):
                assert (await client.get(f"/v1/requests/{name}")).status_code == 404
                assert (await client.get(f"/nowhere/{name}")).status_code == 404
            assert (await client.request("BREW", "/v1/requests")).status_code == 405
            assert (await client.get(f"/v1/requests/{bench.spec.id}")).status_code == 200
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain")
            return answer.text

    samples = {
        sample.name + "".join(f"|{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(asyncio.run(ask_all()))
        for sample in family.samples
    }
    assert samples["teachercache_requests|complete"] == 1
    assert samples["teachercache_tokens_scored_total"] == bench.row().tokens_scored == 48
    stored = {kind: samples[f"teachercache_blob_bytes|{kind}"] for kind in ("upload", "tokens", "shard", "manifest")}
    assert all(size > 0 for size in stored.values())
    assert stored["shard"] == sum(shard.bytes for shard in newest(bench).shards)
    assert samples["teachercache_http_requests_total|GET|/v1/requests/{request_id}|404"] == 2
    assert samples["teachercache_http_requests_total|GET|/v1/requests/{request_id}|200"] == 1
    assert samples["teachercache_http_requests_total|GET|other|404"] == 2
    assert samples["teachercache_http_request_seconds_count|/v1/requests/{request_id}"] == 3
    assert samples["process_resident_memory_bytes"] > 0
    assert not any("BREW" in name or "nowhere" in name for name in samples)


def test_a_body_that_does_not_come_is_given_up(bench: Bench, tmp_path: Path) -> None:
    """By a real server, whose socket is left open in the middle of an upload."""
    with TinyServer(tmp_path / "served", TEACHERCACHE_BODY_SECONDS="0.5") as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = f"PUT /v1/blobs/sha256:{'0' * 64} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\nPAR1"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head.encode())
            answer = b""
            while part := connection.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 408 ") and b"nothing of the body came for 0.5 s, after 4 bytes" in answer
        assert list((server.data_dir / "staging").iterdir()) == []
