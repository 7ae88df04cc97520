"""The client: ask a server for caches, wait for them, fetch them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..format_spec import Code, Manifest, Submission, digest_bytes, digest_file, is_digest, is_request_id
from .blobs import DEFAULT_LIMIT_BYTES, BlobCache
from .directory import CacheDirectory
from .download import blob_path
from .errors import (
    BadAnswer,
    CacheIncomplete,
    CacheNotFound,
    ConfigError,
    IntegrityError,
    OfflineMiss,
    ServerError,
    WaitTimeout,
)
from .transport import DEFAULT_RETRY_S, Transport, is_offline
from .upload import as_parquet
from .views import Estimate, RequestView, Teacher

if TYPE_CHECKING:
    from .sequences import Sequences

FIRST_POLL_S = 0.1
MAX_POLL_S = 2.0
POLL_GROWTH = 1.5
PAGE = 100
Answer = TypeVar("Answer")


class Client:
    """A teachercache server, and the local cache of what came from it; a context manager.

    `url`, `token` and `cache_dir` default to TEACHERCACHE_URL, TEACHERCACHE_TOKEN and
    TEACHERCACHE_CACHE_DIR. Failures that may pass are tried again for `retry_s` seconds. All methods
    raise the subclasses of ClientError, and FormatError for data and answers that break the format.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        cache_dir: Path | str | None = None,
        *,
        cache_limit_bytes: int = DEFAULT_LIMIT_BYTES,
        retry_s: float = DEFAULT_RETRY_S,
    ) -> None:
        self.transport = Transport(url, token, retry_s=retry_s)
        self.cache = BlobCache(cache_dir, cache_limit_bytes)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()

    def upload(self, path: Path | str) -> str:
        """Upload a data set, Parquet or JSON Lines, unless the server has it; return its digest."""
        with as_parquet(Path(path)) as parquet:
            digest = digest_file(parquet)
            if not self.transport.exists(blob_path(digest)):
                self.transport.put_file(blob_path(digest), parquet)
        return digest

    def submit(self, submission: Submission | None = None, /, **settings: Any) -> RequestView:
        """Ask for a cache, with a Submission or its fields; the same request is the same cache."""
        return RequestView.from_json(self.transport.post_json("v1/requests", _body(submission, settings)))

    def estimate(self, submission: Submission | None = None, /, **settings: Any) -> Estimate:
        """Return what a submission would cost; the teacher does not run."""
        answer = self.transport.post_json("v1/requests", _body(submission, settings), params={"dry_run": "true"})
        return Estimate.from_json(answer)

    def status(self, request_id: str) -> RequestView:
        """Return the request as it is now."""
        path = f"v1/requests/{_checked_id(request_id)}"
        return RequestView.from_json(_found(request_id, lambda: self.transport.get_json(path)))

    def wait(
        self, request_id: str, timeout_s: float | None = None, on_progress: Callable[[RequestView], None] | None = None
    ) -> RequestView:
        """Return the request once it is complete; `on_progress` sees every state on the way.

        Raises:
            RequestFailed: the teacher could not finish it.
            WaitTimeout: `timeout_s` seconds are over; the request goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = FIRST_POLL_S
        while True:
            view = self.status(request_id)
            if on_progress is not None:
                on_progress(view)
            view.raise_if_failed()
            if view.is_finished:
                return view
            if deadline is not None and time.monotonic() + poll > deadline:
                raise WaitTimeout(f"request {request_id} is {view.state} after {timeout_s:g} s; it goes on")
            self.transport.sleep(poll)
            poll = min(poll * POLL_GROWTH, MAX_POLL_S)

    def cancel(self, request_id: str) -> RequestView:
        """Take back one's own request; the teacher stops when nobody else wants it, and what it finished stays."""
        path = f"v1/requests/{_checked_id(request_id)}/cancel"
        return RequestView.from_json(_found(request_id, lambda: self.transport.post_json(path)))

    def ls(self) -> Iterator[RequestView]:
        """Yield the server's requests, the newest first, asking for them a page at a time."""
        cursor = None
        while True:
            params = {"limit": PAGE} if cursor is None else {"limit": PAGE, "cursor": cursor}
            page = self.transport.get_json("v1/requests", params)
            yield from map(RequestView.from_json, _items(page))
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def teachers(self) -> list[Teacher]:
        """Return the teachers that the server runs."""
        return [Teacher.from_json(item) for item in _items(self.transport.get_json("v1/teachers"))]

    def retry(self, request_id: str) -> RequestView:
        """Queue a failed request again."""
        path = f"v1/requests/{_checked_id(request_id)}/retry"
        return RequestView.from_json(_found(request_id, lambda: self.transport.post_json(path, retry=False)))

    def manifest(self, cache: str) -> Manifest:
        """Return the manifest with this digest, or the newest one of this request: partial while it runs.

        A manifest that the local cache has by digest costs no request.

        Raises:
            CacheIncomplete: the request has none yet.
            RequestFailed: the request has failed and left none.
        """
        manifest = self._pinned_manifest(cache) if is_digest(cache) else self._newest_manifest(_checked_id(cache))
        if manifest.complete and not is_offline():
            self.cache.add_manifest(manifest)
        return manifest

    def sequences(self, cache: str) -> Sequences:
        """Return the sequences of a cache, as far as the teacher has come: any of them, without fetching its shard.

        `cache` is a request id or a manifest digest. Close it before the client.

        Raises:
            CacheIncomplete: the request has no shard yet.
        """
        # it imports this module
        from .sequences import Sequences

        return Sequences(self, cache)

    def pull(
        self, cache: str, directory: Path | str, on_progress: Callable[[int, int], None] | None = None
    ) -> Manifest:
        """Fetch a complete cache into a directory that `stream_topk` reads without a server.

        Shards that are there and sound stay, so a pull that broke off goes on where it was.
        `on_progress` gets (bytes done, bytes in all).

        Raises:
            CacheIncomplete: the teacher has not finished.
        """
        manifest = self.manifest(cache)
        if not manifest.complete:
            if is_request_id(cache):
                self.status(cache).raise_if_failed()
            raise CacheIncomplete(f"cache {cache} is not complete: wait for request {manifest.request.id}")
        CacheDirectory(directory).fill(manifest, self.transport, on_progress)
        return manifest

    def _pinned_manifest(self, digest: str) -> Manifest:
        known = self.cache.manifest(digest)
        if known is not None:
            return known
        data = _found(digest, lambda: self.transport.get_bytes(f"v1/manifests/{digest}"))
        if digest_bytes(data) != digest:
            raise IntegrityError(f"the server sent another manifest than {digest}: {digest_bytes(data)}")
        return Manifest.from_bytes(data)

    def _newest_manifest(self, request_id: str) -> Manifest:
        if is_offline():
            known = self.cache.manifest_of(request_id)
            if known is None:
                raise OfflineMiss(
                    f"TEACHERCACHE_OFFLINE is set and {self.cache.root} lacks the manifest of request {request_id}"
                )
            return known
        try:
            data = _found(request_id, lambda: self.transport.get_bytes(f"v1/requests/{request_id}/manifest"))
        except ServerError as error:
            if error.code is Code.NO_MANIFEST_YET:
                raise CacheIncomplete(f"request {request_id} has no shard yet") from error
            if error.code is Code.JOB_FAILED:
                self.status(request_id).raise_if_failed()
            raise
        manifest = Manifest.from_bytes(data)
        if manifest.request.id != request_id:
            raise IntegrityError(f"the server sent the manifest of request {manifest.request.id}, not of {request_id}")
        return manifest


def _body(submission: Submission | None, settings: dict[str, Any]) -> dict[str, Any]:
    if submission is None:
        return Submission.from_json(settings).to_json()
    if settings:
        raise ConfigError(f"give a Submission or its fields, not both: {sorted(settings)}")
    return submission.to_json()


def _items(page: Any) -> list[Any]:
    items = page.get("items") if isinstance(page, dict) else None
    if not isinstance(items, list):
        raise BadAnswer(f"the server sent {type(page).__name__} without items; is this a teachercache server?")
    return items


def _checked_id(text: str) -> str:
    if not is_request_id(text):
        raise ConfigError(f"a request is named by its id of 64 hex digits, not {text!r}")
    return text


def _found(name: str, ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except ServerError as error:
        if error.status == 404 and error.code is not Code.NO_MANIFEST_YET:
            raise CacheNotFound(f"the server has no {name}") from error
        raise
