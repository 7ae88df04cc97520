"""The service's wire in memory, for tests of the client that need faults on purpose; not a test itself."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from format_samples import fingerprint, sequence, shard_bytes

from teachercache.format_spec import (
    CacheRequest,
    Code,
    Manifest,
    QualityTally,
    ScoredSequence,
    ShardDescriptor,
    Submission,
    digest_bytes,
)

Fault = Callable[["Handler"], None]


@dataclass
class Cache:
    """A cache in memory: its sequences, shards and complete manifest."""

    sequences: list[ScoredSequence]
    blobs: list[bytes]
    manifest: Manifest
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.manifest.request.id

    def partial(self, shards: int) -> Manifest:
        """The manifest while only the first `shards` shards are there."""
        return replace(self.manifest, shards=self.manifest.shards[:shards], complete=False)


def make_cache(
    sizes: tuple[int, ...] = (3, 4, 2),
    *,
    seed: int = 0,
    tail_samples: int = 4,
    made: list[ScoredSequence] | None = None,
) -> Cache:
    """A cache whose shards hold so many sequences, random ones unless given."""
    request = CacheRequest(
        teacher=fingerprint().teacher,
        data=digest_bytes(b"data %d" % seed),
        engine="transformers",
        dtype="float32",
        head_dtype="float32",
        k=5,
        min_prob="0",
        tail_samples=tail_samples,
        seed=seed,
        profile="bf16",
        shard_positions=100,
    )
    total = sum(sizes)
    if made is None:
        made = [sequence(1000 * seed + i, 5 + (7 * i) % 11, tail_samples=tail_samples) for i in range(total)]
    blobs, shards, tally, first = [], [], QualityTally(), 0
    for size in sizes:
        part = made[first : first + size]
        data = shard_bytes(*part)
        blobs.append(data)
        shards.append(ShardDescriptor(digest_bytes(data), len(data), first, size, sum(map(len, part))))
        first += size
        for item in part:
            tally.add(item.rows)
    return Cache(made, blobs, Manifest(request, fingerprint(), "tiny", total, True, tuple(shards), tally.quality()))


class FaultyServer:
    """Serves what it is given; `fail` makes the next answers to some requests wrong."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.newest: dict[str, str] = {}
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self._faults: list[tuple[str, re.Pattern[str], Fault]] = []
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"owner": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def fail(self, method: str, path: str, *faults: Fault) -> None:
        """Answer the next matching requests with these faults, one each; `path` is a regular expression."""
        with self._lock:
            self._faults += [(method, re.compile(path), fault) for fault in faults]

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for i, (wanted, pattern, fault) in enumerate(self._faults):
                if wanted == method and pattern.search(path):
                    del self._faults[i]
                    return fault
        return None

    def count(self, method: str, path: str) -> int:
        """How many requests came in for `path`, a regular expression."""
        return sum(1 for m, p, _ in self.log if m == method and re.search(path, p))

    def add(self, cache: Cache, *, shards: int | None = None, state: str | None = None) -> None:
        """Serve a cache, whole or as far as the first `shards` shards."""
        whole = shards is None
        manifest = cache.manifest if shards is None else cache.partial(shards)
        for shard, blob in zip(manifest.shards, cache.blobs, strict=False):
            self.blobs[shard.digest] = blob
        self.views[cache.id] = _view(cache, manifest, state or ("complete" if whole else "running"))
        if manifest.shards:
            self.manifests[manifest.digest] = manifest.to_bytes()
            self.newest[cache.id] = manifest.digest

    def fail_request(self, cache: Cache) -> None:
        """Let the request fail as it stands."""
        self.views[cache.id] |= {"state": "failed", "error": {"code": "internal", "detail": "the engine died"}}

    @contextmanager
    def running(self) -> Iterator[FaultyServer]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), name="faulty-server")
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            thread.join()
            self._http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: FaultyServer

    def log_message(self, format: str, *args: Any) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        self.owner.log.append((method, self.path, dict(self.headers)))
        self.received = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.owner.take_fault(method, self.path)
        if fault is not None:
            fault(self)
        else:
            self.answer_well(method)

    def answer_well(self, method: str) -> None:
        path = self.path.partition("?")[0]
        match = re.fullmatch(r"/v1/(blobs|manifests)/(sha256:\w+)", path)
        if match and method == "PUT":
            self._put(match[2])
        elif match:
            store = self.owner.blobs if match[1] == "blobs" else self.owner.manifests
            self._bytes(store.get(match[2]), match[2])
        elif match := re.fullmatch(r"/v1/requests/(\w+)/manifest", path):
            self._newest(match[1])
        elif match := re.fullmatch(r"/v1/requests/(\w+)(/retry)?", path):
            self._view(match[1], bool(match[2]))
        elif path == "/v1/requests":
            self._submit() if method == "POST" else self._list()
        elif path == "/v1/teachers":
            self.send_json(200, {"items": [TEACHER]})
        else:
            self.send_problem(Code.NOT_FOUND)

    def send_body(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, status: int, value: Any) -> None:
        self.send_body(status, json.dumps(value).encode(), Content_Type="application/json")

    def send_problem(self, code: Code, detail: str = "as the test wants it", **headers: str) -> None:
        body = {"type": "about:blank", "title": code.wire, "status": code.status, "detail": detail, "code": code.wire}
        headers["Content_Type"] = "application/problem+json"
        self.send_body(code.status, json.dumps(body).encode(), **headers)

    def hang_up(self) -> None:
        """Close the connection without another byte."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _bytes(self, data: bytes | None, digest: str) -> None:
        if data is None:
            return self.send_problem(Code.NOT_FOUND)
        etag = f'"{digest}"'
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None or self.headers.get("If-Range", etag) != etag:
            return self.send_body(200, data, ETag=etag)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            return self.send_problem(Code.RANGE_NOT_SATISFIABLE)
        place = f"bytes {first}-{last}/{len(data)}"
        return self.send_body(206, data[first : last + 1], ETag=etag, Content_Range=place)

    def _put(self, digest: str) -> None:
        if digest_bytes(self.received) != digest:
            return self.send_problem(Code.DIGEST_MISMATCH)
        new = digest not in self.owner.blobs
        self.owner.blobs[digest] = self.received
        return self.send_json(201 if new else 200, {"digest": digest, "bytes": len(self.received)})

    def _newest(self, request_id: str) -> None:
        view = self.owner.views.get(request_id)
        digest = self.owner.newest.get(request_id)
        if view is None:
            self.send_problem(Code.NOT_FOUND)
        elif digest is not None:
            self._bytes(self.owner.manifests[digest], digest)
        else:
            self.send_problem(Code.JOB_FAILED if view["state"] == "failed" else Code.NO_MANIFEST_YET)

    def _view(self, request_id: str, retry: bool) -> None:
        view = self.owner.views.get(request_id)
        if view is None:
            self.send_problem(Code.NOT_FOUND)
        elif not retry:
            self.send_json(200, view)
        elif view["state"] == "failed":
            view |= {"state": "queued", "error": None}
            self.send_json(202, view)
        else:
            self.send_problem(Code.JOB_FAILED, "only a failed request can be queued again")

    def _submit(self) -> None:
        submission = Submission.from_json(json.loads(self.received))
        request = submission.resolve(
            teacher=fingerprint().teacher,
            vocab_size=1000,
            engine="transformers",
            dtype="float32",
            head_dtype="float32",
            draws_tail_samples=True,
        )
        exists = request.id in self.owner.views
        if "dry_run=true" in self.path:
            estimate = {"id": request.id, "sequences": 9, "positions": 90, "estimated_bytes": 2500, "exists": exists}
            return self.send_json(200, estimate | {"estimated_seconds": None})
        if not exists:
            self.owner.views[request.id] = QUEUED | {"id": request.id, "request": request.to_json()}
        return self.send_json(200 if exists else 202, self.owner.views[request.id] | {"created": not exists})

    def _list(self) -> None:
        """Two a page, to see the client turn pages."""
        views = list(self.owner.views.values())[::-1]
        match = re.search(r"cursor=(\d+)", self.path)
        first = int(match[1]) if match else 0
        rest = str(first + 2) if first + 2 < len(views) else None
        self.send_json(200, {"items": views[first : first + 2], "next_cursor": rest})


TEACHER = {
    "name": "tiny",
    "digest": fingerprint().teacher,
    "tokenizer": fingerprint().tokenizer,
    "vocab_size": 1000,
    "max_length": 512,
    "engine": "transformers",
    "dtype": "float32",
    "head_dtype": "float32",
    "tail_samples": True,
}
QUEUED: dict[str, Any] = {
    "state": "queued",
    "teacher_name": "tiny",
    "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-01T00:00:00Z",
    "sequences": None,
    "positions_total": None,
    "positions_done": 0,
    "shards_total": None,
    "shards_done": 0,
    "tokens_per_s": None,
    "eta_s": None,
    "error": None,
    "manifest": None,
    "teacher_tokens_scored": 0,
}


def _view(cache: Cache, manifest: Manifest, state: str) -> dict[str, Any]:
    return QUEUED | {
        "id": cache.id,
        "state": state,
        "request": asdict(manifest.request),
        "sequences": manifest.sequences,
        "positions_total": cache.manifest.num_positions,
        "positions_done": manifest.num_positions,
        "shards_total": len(cache.blobs),
        "shards_done": len(manifest.shards),
        "teacher_tokens_scored": manifest.num_positions,
        "manifest": manifest.digest if manifest.shards else None,
    }


def refuse(code: Code, **headers: str) -> Fault:
    """Answer with a problem."""
    return lambda handler: handler.send_problem(code, **headers)


def send(status: int, body: bytes = b"", **headers: str) -> Fault:
    """Answer with exactly this."""
    return lambda handler: handler.send_body(status, body, **headers)


def cut_after(num_bytes: int) -> Fault:
    """Promise the whole body of what was asked for from its beginning or middle, and hang up early."""

    def fault(handler: Handler) -> None:
        digest = handler.path.rpartition("/")[2]
        data = handler.owner.blobs[digest]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        first, end = (int(wanted[1]), int(wanted[2] or len(data) - 1) + 1) if wanted else (0, len(data))
        handler.send_response(206 if wanted else 200)
        handler.send_header("Content-Length", str(end - first))
        if wanted:
            handler.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
        handler.end_headers()
        handler.wfile.write(data[first : min(first + num_bytes, end)])
        handler.hang_up()

    return fault


def hang(release: threading.Event) -> Fault:
    """Say nothing until released."""

    def fault(handler: Handler) -> None:
        release.wait(30)
        handler.hang_up()

    return fault
