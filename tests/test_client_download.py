"""A blob arrives whole and verified, or not at all."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_server import Fault, FaultyServer, Handler, cut_after, refuse, send

from teachercache.client import CacheUnusable, ConnectionFailed, IntegrityError, ServerError
from teachercache.client.download import download
from teachercache.client.transport import Transport
from teachercache.format_spec import Code, digest_bytes

DATA = bytes(range(256)) * 1000
DIGEST = digest_bytes(DATA)
PATH = "/v1/blobs/"


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer().running() as running:
        running.blobs[DIGEST] = DATA
        yield running


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "file"


def fetch(server: FaultyServer, target: Path, retry_s: float = 5.0) -> None:
    transport = Transport(server.url, retry_s=retry_s)
    try:
        download(transport, DIGEST, len(DATA), target)
    finally:
        transport.close()
        assert [path.name for path in target.parent.glob("*") if path != target] == []


def ranges(server: FaultyServer) -> list[str | None]:
    return [headers.get("Range") for _, _, headers in server.log]


def test_plain(server: FaultyServer, target: Path) -> None:
    seen: list[int] = []
    download(Transport(server.url), DIGEST, len(DATA), target, on_bytes=seen.append)
    assert target.read_bytes() == DATA
    assert seen == sorted(seen)
    assert seen[-1] == len(DATA)


def test_broken_connection_is_resumed(server: FaultyServer, target: Path) -> None:
    server.fail("GET", PATH, cut_after(100_000), cut_after(50_000))
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert ranges(server) == [None, "bytes=100000-", "bytes=150000-"]
    assert all(headers["If-Range"] == f'"{DIGEST}"' for *_, headers in server.log[1:])


def test_short_answer_without_length_is_resumed(server: FaultyServer, target: Path) -> None:
    def unframed(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(DATA[:1000])
        handler.hang_up()

    server.fail("GET", PATH, unframed)
    fetch(server, target)
    assert ranges(server) == [None, "bytes=1000-"]
    assert target.read_bytes() == DATA


def test_ignored_range_begins_again(server: FaultyServer, target: Path) -> None:
    server.fail("GET", PATH, cut_after(1000), send(200, DATA))
    fetch(server, target)
    assert target.read_bytes() == DATA


@pytest.mark.parametrize(
    "rest",
    [
        send(206, DATA[500:], Content_Range=f"bytes 500-{len(DATA) - 1}/{len(DATA)}"),
        send(206, DATA[1000:], Content_Range=f"bytes 1000-{len(DATA) - 1}/{len(DATA) + 1}"),
        send(206, DATA[1000:], Content_Range="bytes 1000-*/*"),
        send(206, DATA[1000:]),
        send(206, DATA[1000:], Content_Range=f"bytes 1000-{len(DATA) - 1}/{len(DATA)}", ETag='"another"'),
        refuse(Code.RANGE_NOT_SATISFIABLE),
    ],
    ids=["other-start", "other-size", "no-size", "no-content-range", "other-etag", "416"],
)
def test_wrong_rest_begins_again(server: FaultyServer, target: Path, rest: Fault) -> None:
    server.fail("GET", PATH, cut_after(1000), rest)
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert ranges(server) == [None, "bytes=1000-", None]


def test_wrong_bytes_are_fetched_again(server: FaultyServer, target: Path) -> None:
    server.fail("GET", PATH, send(200, bytes(len(DATA))), send(200, DATA + b"more"))
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert len(server.log) == 3


def test_wrong_bytes_for_ever(server: FaultyServer, target: Path) -> None:
    server.blobs[DIGEST] = DATA[:-1] + b"?"
    with pytest.raises(IntegrityError, match="arrives damaged, 4 times now: the bytes have another digest"):
        fetch(server, target)
    assert not target.exists()


def test_endless_body_is_cut_off(server: FaultyServer, target: Path) -> None:
    server.blobs[DIGEST] = DATA * 10
    with pytest.raises(IntegrityError, match=f"more than the {len(DATA)} bytes"):
        fetch(server, target)


def test_connection_that_never_gets_further(server: FaultyServer, target: Path) -> None:
    server.fail("GET", PATH, *[cut_after(0)] * 100)
    with pytest.raises(ConnectionFailed, match="broke off"):
        fetch(server, target, retry_s=0.5)
    assert not target.exists()


def test_slow_progress_is_progress(server: FaultyServer, target: Path) -> None:
    """Each cut costs a pause; together they take longer than the time without progress that is allowed."""
    server.fail("GET", PATH, *[cut_after(10_000)] * 20)
    fetch(server, target, retry_s=0.5)
    assert target.read_bytes() == DATA


def test_proxy_that_compresses(server: FaultyServer, target: Path) -> None:
    server.fail("GET", PATH, send(200, gzip.compress(DATA), Content_Encoding="gzip"))
    fetch(server, target)
    assert target.read_bytes() == DATA


def test_missing_blob(server: FaultyServer, target: Path) -> None:
    server.blobs.clear()
    with pytest.raises(ServerError) as caught:
        fetch(server, target)
    assert caught.value.code is Code.NOT_FOUND


def test_folder_that_cannot_be(server: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file")
    with pytest.raises(CacheUnusable, match="cannot write"):
        download(Transport(server.url), DIGEST, len(DATA), tmp_path / "deep" / "file")
