"""HTTP to one server: retries, redirects that never carry the token away, and problems as errors."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from ..format_spec import Code
from .backoff import Backoff
from .errors import BadAnswer, ConfigError, ConnectionFailed, OfflineMiss, ServerError

DEFAULT_RETRY_S = 60.0
RETRYABLE_STATUS = frozenset({429, 502, 503, 504})
MAX_REDIRECTS = 5
# httpx counts these from the last byte that moved, so a long transfer is fine and a stalled one is not.
TIMEOUT = httpx.Timeout(connect=10.0, read=60.0, write=60.0, pool=30.0)
# Answers without problem+json come from something between us and the service.
STATUS_CODES = {
    400: Code.INVALID_REQUEST,
    404: Code.NOT_FOUND,
    413: Code.TOO_LARGE,
    416: Code.RANGE_NOT_SATISFIABLE,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}


def is_offline() -> bool:
    """Tell whether TEACHERCACHE_OFFLINE switches the network off.

    Raises:
        ConfigError: the variable is neither a yes nor a no.
    """
    value = os.environ.get("TEACHERCACHE_OFFLINE", "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"TEACHERCACHE_OFFLINE must be 1 or 0, not {value!r}")


class _Process:
    """What must not be shared over a fork: sockets, and an event whose lock another thread may hold."""

    def __init__(self, http: httpx.Client) -> None:
        self.pid = os.getpid()
        self.http = http
        self.closing = threading.Event()


class Transport:
    """One server's API; may be used from several threads and after a fork.

    `url` and `token` default to TEACHERCACHE_URL and TEACHERCACHE_TOKEN. An operation is tried again
    for at most `retry_s` seconds without progress. Proxy variables are ignored for a loopback address.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, retry_s: float = DEFAULT_RETRY_S) -> None:
        self.url = _checked_url(url or os.environ.get("TEACHERCACHE_URL", ""))
        self._token = token if token is not None else os.environ.get("TEACHERCACHE_TOKEN") or None
        self._retry_s = retry_s
        self._process = _Process(self._connect())

    def __repr__(self) -> str:
        return f"Transport({str(self.url)!r})"

    def cancel(self) -> None:
        """Make pauses and transfers that other threads are in end with ConnectionFailed."""
        self._here().closing.set()

    def close(self) -> None:
        """Cancel what runs and close the connections."""
        self.cancel()
        self._here().http.close()

    def check_open(self) -> None:
        """Raise ConnectionFailed when this transport was cancelled."""
        if self._here().closing.is_set():
            raise ConnectionFailed("the client was closed")

    def sleep(self, seconds: float) -> None:
        """Pause, and raise ConnectionFailed at once when this transport is cancelled."""
        self._here().closing.wait(seconds)
        self.check_open()

    def backoff(self) -> Backoff:
        """Return the pauses for one operation made of several requests."""
        return Backoff(self._retry_s, self.sleep)

    def get_json(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer of a GET."""
        with self.open("GET", path, params=params) as response:
            return _json(response)

    def post_json(
        self, path: str, body: Any = None, *, params: Mapping[str, Any] | None = None, retry: bool = True
    ) -> Any:
        """Return the JSON answer of a POST; `retry=False` for one whose repetition means something else."""
        with self.open("POST", path, retry=retry, params=params, json=body) as response:
            return _json(response)

    def get_bytes(self, path: str) -> bytes:
        """Return the body of a GET."""
        with self.open("GET", path) as response:
            return response.read()

    def exists(self, path: str) -> bool:
        """Tell whether the server has `path`."""
        try:
            with self.open("HEAD", path):
                return True
        except ServerError as error:
            if error.status == 404:
                return False
            raise

    def put_file(self, path: str, file: Path) -> None:
        """Send the bytes of `file`, a block at a time."""
        with self.open("PUT", path, file=file) as response:
            response.read()

    @contextlib.contextmanager
    def open(
        self, method: str, path: str, *, retry: bool = True, file: Path | None = None, **options: Any
    ) -> Iterator[httpx.Response]:
        """Give a successful answer, its body still to be read.

        Raises:
            OfflineMiss, ServerError, BadAnswer, ConnectionFailed: also when the body breaks off while it is read.
        """
        if is_offline():
            raise OfflineMiss(f"TEACHERCACHE_OFFLINE is set: {method} {self.url}{path} is not sent")
        backoff = self.backoff()
        while True:
            self.check_open()
            try:
                response = self._attempt(method, path, file, options)
                break
            except (ConnectionFailed, ServerError) as error:
                if not retry or (isinstance(error, ServerError) and error.status not in RETRYABLE_STATUS):
                    raise
                backoff.pause(error)
        try:
            yield response
        except httpx.RequestError as error:
            raise ConnectionFailed(f"answer of {self.url}{path} broke off: {_words(error)}") from error
        finally:
            response.close()

    def _attempt(self, method: str, path: str, file: Path | None, options: dict[str, Any]) -> httpx.Response:
        http = self._here().http
        with contextlib.ExitStack() as stack:
            content = None if file is None else stack.enter_context(file.open("rb"))
            request = http.build_request(method, path, content=content, **options)
            try:
                response = self._follow(http, http.send(request, stream=True))
                if not response.is_success:
                    response.read()
            except httpx.RequestError as error:
                raise ConnectionFailed(f"cannot reach {self.url}: {_words(error)}") from error
        if not response.is_success:
            raise _problem(response)
        return response

    def _follow(self, http: httpx.Client, response: httpx.Response) -> httpx.Response:
        """Follow redirects of reads. httpx leaves the Authorization header out when the origin changes."""
        for _ in range(MAX_REDIRECTS + 1):
            following = response.next_request
            if following is None:
                return response
            origin = response.request
            response.close()
            if origin.method not in ("GET", "HEAD"):
                raise BadAnswer(f"{origin.method} {origin.url} was redirected; use the url {following.url}")
            if origin.url.scheme == "https" and following.url.scheme != "https":
                raise BadAnswer(f"{origin.url} redirects to {following.url}, which is not encrypted")
            response = http.send(following, stream=True)
        response.close()
        raise BadAnswer(f"{self.url} redirects more than {MAX_REDIRECTS} times")

    def _here(self) -> _Process:
        if self._process.pid != os.getpid():
            closed = self._process.closing.is_set()
            self._process = _Process(self._connect())
            if closed:
                self._process.closing.set()
        return self._process

    def _connect(self) -> httpx.Client:
        # Blobs are compressed inside, and byte ranges are only meaningful in the identity encoding.
        headers = {"Accept-Encoding": "identity", "User-Agent": "teachercache"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=TIMEOUT, trust_env=not _is_loopback(self.url.host)
        )


def _checked_url(text: str) -> httpx.URL:
    if not text:
        raise ConfigError("no server given: pass url or set TEACHERCACHE_URL")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ConfigError(f"url {text!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"url must begin with http:// or https://, not {text!r}")
    if url.userinfo:
        raise ConfigError("url must not carry a user or password; the token goes into TEACHERCACHE_TOKEN")
    return url.copy_with(path=url.path.rstrip("/") + "/", query=None, fragment=None)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _problem(response: httpx.Response) -> ServerError:
    status = response.status_code
    try:
        problem = json.loads(response.content)
        code, detail = Code.from_wire(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        code = STATUS_CODES.get(status, Code.INTERNAL)
        detail = f"{response.request.method} {response.request.url}: {response.reason_phrase or 'refused'}"
    return ServerError(detail, code, status, _retry_after(response.headers.get("Retry-After")))


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max((when.astimezone(UTC) - datetime.now(UTC)).total_seconds(), 0.0)


def _json(response: httpx.Response) -> Any:
    try:
        return json.loads(response.read())
    except ValueError as error:
        raise BadAnswer(f"{response.request.url} did not answer with JSON; is this a teachercache server?") from error


def _words(error: httpx.RequestError) -> str:
    return str(error) or type(error).__name__
