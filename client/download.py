"""One blob on its way from the server to a file: resumed when broken off, verified before it is there."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import httpx

from ..format_spec import Code
from ..format_spec.part import replacing
from .errors import CacheUnusable, ConnectionFailed, IntegrityError, ServerError
from .transport import Transport

RESTARTS = 3
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_log = logging.getLogger(__name__)


def blob_path(digest: str) -> str:
    """Return where the API has the blob."""
    return f"v1/blobs/{digest}"


def download(
    transport: Transport,
    digest: str,
    num_bytes: int,
    target: Path,
    *,
    parts: Path | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Fetch the blob `digest` of `num_bytes` bytes to `target`, which appears whole and verified or not at all.

    The part file is this call's own, in `parts` (default: beside the target). `on_bytes` is told how many
    bytes are there so far.

    Raises:
        IntegrityError: the server keeps sending other bytes.
        CacheUnusable: the file cannot be written.
    """
    try:
        with replacing(target, parts) as file:
            _Download(transport, digest, num_bytes, file, on_bytes).run()
    except OSError as error:
        raise CacheUnusable(f"cannot write {target}: {error.strerror or error}") from error


class _Download:
    """The state of one download: how much is there, and its hash so far."""

    def __init__(
        self, transport: Transport, digest: str, num_bytes: int, file: BinaryIO, on_bytes: Callable[[int], None] | None
    ) -> None:
        self._transport = transport
        self._digest = digest
        self._etag = f'"{digest}"'
        self._num_bytes = num_bytes
        self._file = file
        self._on_bytes = on_bytes
        self._backoff = transport.backoff()
        self._restarts = 0
        self._received = 0
        self._hash = hashlib.sha256()

    def run(self) -> None:
        """Fill the file with the verified blob."""
        while not self._is_verified():
            try:
                self._request()
            except ConnectionFailed as error:
                self._backoff.pause(error)
            except ServerError as error:
                if error.code is not Code.RANGE_NOT_SATISFIABLE or not self._received:
                    raise
                self._restart(str(error))

    def _is_verified(self) -> bool:
        if self._received < self._num_bytes:
            return False
        if f"sha256:{self._hash.hexdigest()}" == self._digest:
            return True
        self._restart("the bytes have another digest")
        return False

    def _request(self) -> None:
        headers = {}
        if self._received:
            headers = {"Range": f"bytes={self._received}-", "If-Range": self._etag}
        with self._transport.open("GET", blob_path(self._digest), headers=headers) as response:
            if self._received and not self._continues(response):
                self._restart(f"asked for the rest, got HTTP {response.status_code} from the beginning or elsewhere")
                if response.status_code != 200:
                    return
            for block in response.iter_bytes():
                self._take(block)
                if not self._received:
                    return
        if self._received < self._num_bytes:
            raise ConnectionFailed(f"{self._digest} ended after {self._received} of {self._num_bytes} bytes")

    def _continues(self, response: httpx.Response) -> bool:
        """Tell whether the answer is the rest that was asked for: servers and proxies may ignore a range."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        return (
            response.status_code == 206
            and match is not None
            and (int(match[1]), int(match[3])) == (self._received, self._num_bytes)
            and response.headers.get("ETag", self._etag) == self._etag
        )

    def _take(self, block: bytes) -> None:
        self._transport.check_open()
        if self._received + len(block) > self._num_bytes:
            self._restart(f"more than the {self._num_bytes} bytes that the manifest says")
            return
        self._file.write(block)
        self._hash.update(block)
        self._received += len(block)
        self._backoff.progress()
        if self._on_bytes is not None:
            self._on_bytes(self._received)

    def _restart(self, reason: str) -> None:
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise IntegrityError(f"{self._digest} arrives damaged, {self._restarts} times now: {reason}")
        _log.warning("%s begins again: %s", self._digest, reason)
        self._file.seek(0)
        self._file.truncate()
        self._received = 0
        self._hash = hashlib.sha256()
