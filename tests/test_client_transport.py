"""Talking to a server that is slow, busy, gone or deceiving."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate

import httpx
import pytest
from faulty_server import FaultyServer, hang, refuse, send

from teachercache.client import BadAnswer, ConfigError, ConnectionFailed, OfflineMiss, ServerError
from teachercache.client import transport as transport_module
from teachercache.client.transport import Transport
from teachercache.format_spec import Code

BUSY = refuse(Code.UNAVAILABLE)


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer().running() as running:
        yield running


@pytest.fixture
def transport(server: FaultyServer) -> Iterator[Transport]:
    made = Transport(server.url, retry_s=5.0)
    yield made
    made.close()


def test_busy_server_is_asked_again(
    server: FaultyServer, transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail("GET", "/v1/teachers", BUSY, send(502), send(504, b"<html>"), send(429))
    with caplog.at_level(logging.WARNING, "teachercache.client"):
        assert len(transport.get_json("v1/teachers")["items"]) == 1
    assert server.count("GET", "/v1/teachers") == 5
    assert len(caplog.records) == 4


def test_retry_after_is_obeyed(server: FaultyServer, transport: Transport) -> None:
    server.fail("GET", "/v1/teachers", refuse(Code.DRAINING, Retry_After="1"))
    began = time.monotonic()
    transport.get_json("v1/teachers")
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_beyond_our_time_ends_at_once(server: FaultyServer, transport: Transport, form: str) -> None:
    value = "3600" if form == "seconds" else formatdate(time.time() + 3600, usegmt=True)
    server.fail("GET", "/v1/teachers", refuse(Code.UNAVAILABLE, Retry_After=value))
    with pytest.raises(ServerError) as caught:
        transport.get_json("v1/teachers")
    assert (caught.value.code, caught.value.status) == (Code.UNAVAILABLE, 503)
    assert caught.value.retry_after_s == pytest.approx(3600, abs=60)
    assert server.count("GET", "/v1/teachers") == 1


def test_retries_end(server: FaultyServer) -> None:
    server.fail("GET", "/v1/teachers", *[BUSY] * 50)
    with pytest.raises(ServerError):
        Transport(server.url, retry_s=0.5).get_json("v1/teachers")
    assert 1 < server.count("GET", "/v1/teachers") < 50


@pytest.mark.parametrize("code", [Code.INVALID_REQUEST, Code.INTERNAL, Code.INSUFFICIENT_STORAGE, Code.TOO_LARGE])
def test_other_problems_are_told_at_once(server: FaultyServer, transport: Transport, code: Code) -> None:
    server.fail("POST", "/v1/requests", refuse(code))
    with pytest.raises(ServerError, match=r"as the test wants it \(HTTP \d+\)") as caught:
        transport.post_json("v1/requests", {})
    assert (caught.value.code, caught.value.status, caught.value.detail) == (code, code.status, "as the test wants it")
    assert server.count("POST", "/v1/requests") == 1


def test_answer_that_is_no_problem_document(server: FaultyServer, transport: Transport) -> None:
    server.fail("GET", "/v1/teachers", send(404, b"<html>nginx</html>"), send(500, b'{"code": 3}'), send(418))
    for code in (Code.NOT_FOUND, Code.INTERNAL, Code.INTERNAL):
        with pytest.raises(ServerError, match="GET http") as caught:
            transport.get_json("v1/teachers")
        assert caught.value.code is code


def test_answer_that_is_not_json(server: FaultyServer, transport: Transport) -> None:
    server.fail("GET", "/v1/teachers", send(200, b"<html>"))
    with pytest.raises(BadAnswer, match="is this a teachercache server"):
        transport.get_json("v1/teachers")


def test_nobody_listens() -> None:
    with pytest.raises(ConnectionFailed, match=r"cannot reach http://127\.0\.0\.1:9/"):
        Transport("http://127.0.0.1:9", retry_s=0.3).get_json("v1/teachers")


def test_silent_server(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "TIMEOUT", httpx.Timeout(0.2))
    release = threading.Event()
    server.fail("GET", "/v1/teachers", hang(release))
    assert Transport(server.url, retry_s=5.0).get_json("v1/teachers")["items"]
    assert server.count("GET", "/v1/teachers") == 2
    release.set()


def test_cancel_ends_a_pause(server: FaultyServer) -> None:
    server.fail("GET", "/v1/teachers", *[BUSY] * 100)
    transport = Transport(server.url, retry_s=1000.0)
    timer = threading.Timer(0.3, transport.cancel)
    timer.start()
    began = time.monotonic()
    with pytest.raises(ConnectionFailed, match="closed"):
        transport.get_json("v1/teachers")
    assert time.monotonic() - began < 10.0
    timer.join()


def test_token_is_sent_and_not_shown(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERCACHE_URL", server.url)
    monkeypatch.setenv("TEACHERCACHE_TOKEN", "from-environment")
    Transport().get_json("v1/teachers")
    transport = Transport(token="given")
    transport.get_json("v1/teachers")
    assert [headers["Authorization"] for *_, headers in server.log] == ["Bearer from-environment", "Bearer given"]
    assert "given" not in repr(transport)


def test_redirect_to_another_host_loses_the_token(server: FaultyServer) -> None:
    with FaultyServer().running() as other:
        transport = Transport(server.url, "secret")
        server.fail("GET", "/v1/teachers", send(307, Location=f"{other.url}/v1/teachers"))
        assert transport.get_json("v1/teachers")["items"]
        server.fail("GET", "/v1/teachers", send(307, Location="/v1/teachers?again"))
        assert transport.get_json("v1/teachers")["items"]
        transport.close()
    assert ["Authorization" in headers for *_, headers in other.log] == [False]
    assert ["Authorization" in headers for *_, headers in server.log] == [True, True, True]


def test_redirected_submission_is_refused(server: FaultyServer, transport: Transport) -> None:
    server.fail("POST", "/v1/requests", send(308, Location="http://elsewhere.invalid/v1/requests"))
    with pytest.raises(BadAnswer, match=r"use the url http://elsewhere\.invalid/v1/requests"):
        transport.post_json("v1/requests", {})


def test_redirects_in_a_circle_end(server: FaultyServer, transport: Transport) -> None:
    server.fail("GET", "/v1/teachers", *[send(302, Location="/v1/teachers")] * 20)
    with pytest.raises(BadAnswer, match="redirects more than 5 times"):
        transport.get_json("v1/teachers")


def test_proxies_are_not_used_for_loopback(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert Transport(server.url, retry_s=0.3).get_json("v1/teachers")["items"]
    with pytest.raises(ConnectionFailed):
        Transport("http://cache.invalid", retry_s=0.3).get_json("v1/teachers")


def test_blobs_are_asked_for_as_they_are(server: FaultyServer, transport: Transport) -> None:
    transport.get_json("v1/teachers")
    assert server.log[0][2]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_sends_nothing(server: FaultyServer, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", value)
    with pytest.raises(OfflineMiss, match="TEACHERCACHE_OFFLINE is set"):
        Transport(server.url).get_json("v1/teachers")
    assert server.log == []


def test_offline_must_be_clear(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERCACHE_OFFLINE", "maybe")
    with pytest.raises(ConfigError, match="must be 1 or 0, not 'maybe'"):
        Transport(server.url).get_json("v1/teachers")


@pytest.mark.parametrize("url", ["", "lab:8000", "ftp://lab", "http://", "http://user:pw@lab"])
def test_bad_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHERCACHE_URL", raising=False)
    with pytest.raises(ConfigError, match=r"url|server"):
        Transport(url)


def test_url_may_have_a_path(server: FaultyServer) -> None:
    with pytest.raises(ServerError):
        Transport(f"{server.url}/behind/proxy").get_json("v1/teachers")
    assert server.log[0][1] == "/behind/proxy/v1/teachers"
