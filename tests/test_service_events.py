"""Progress as it comes: each change once, the end, and a word when the server goes."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import TinyServer, random_examples, tiny_teacher, write_examples

__all__ = ["tiny_teacher"]


@pytest.fixture
def server(tiny_teacher: Path, tmp_path: Path) -> Iterator[TinyServer]:
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        yield server


def submit(server: TinyServer, tmp_path: Path, sequences: int) -> str:
    data = server.upload(write_examples(tmp_path / "data.parquet", random_examples(sequences)))
    request: str = server.submit(data, k=4, shard_positions=64).json()["id"]
    return request


def events(url: str, request: str, last: str | None = None) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (id, name, data) of each event until the stream ends."""
    headers = {} if last is None else {"Last-Event-ID": last}
    found = []
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("GET", f"{url}/v1/requests/{request}/events", headers=headers) as answer,
    ):
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        for block in "".join(answer.iter_text()).split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if fields:
                found.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return found


def test_changes_come_until_the_end(server: TinyServer, tmp_path: Path) -> None:
    request = submit(server, tmp_path, 100)
    seen = events(server.url, request)
    names = [name for _, name, _ in seen]
    assert names[-1] == "complete" and set(names[:-1]) == {"progress"}
    versions = [int(version) for version, _, _ in seen]
    assert versions == sorted(set(versions))
    assert seen[-1][2]["manifest"] == server.get(request)["manifest"]
    # who saw all but the end gets the end, who saw that gets nothing
    assert [name for _, name, _ in events(server.url, request, str(versions[0]))] == ["complete"]
    url = f"/v1/requests/{request}/events"
    assert server.http.get(url, headers={"Last-Event-ID": str(versions[-1])}).status_code == 204
    assert server.http.get(f"/v1/requests/{'0' * 64}/events").status_code == 404


def test_a_server_that_ends_says_so_and_ends_in_time(tiny_teacher: Path, tmp_path: Path) -> None:
    server = TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}", "--drain-seconds", "8")
    request = submit(server, tmp_path, 2000)
    seen: list[tuple[str, str, dict[str, Any]]] = []
    listener = threading.Thread(target=lambda: seen.extend(events(server.url, request)))
    listener.start()
    server.wait(request, lambda view: view["state"] == "running")
    server.end(signal.SIGTERM, 0)
    listener.join(20)
    assert not listener.is_alive() and seen[-1][1] == "server_shutdown"
