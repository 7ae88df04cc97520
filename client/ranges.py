"""A blob on the server, a range of bytes at a time."""

from __future__ import annotations

from ..format_spec import Code
from .download import blob_path
from .errors import BadAnswer, ConnectionFailed, IntegrityError, ServerError
from .transport import Transport


class BlobRanges:
    """The blob `digest` of `num_bytes` bytes; what is read of it is not held against the digest.

    Raises:
        IntegrityError: the server has fewer bytes.
        BadAnswer: the answer is not the range; it is not read on, for it may be the whole of a large blob.
    """

    def __init__(self, transport: Transport, digest: str, num_bytes: int) -> None:
        self._transport = transport
        self._digest = digest
        self._etag = f'"{digest}"'
        self._num_bytes = num_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, by one request unless it breaks off."""
        if not length:
            return b""
        backoff = self._transport.backoff()
        while True:
            try:
                return self._request(offset, length)
            except ConnectionFailed as error:
                backoff.pause(error)
            except ServerError as error:
                if error.code is not Code.RANGE_NOT_SATISFIABLE:
                    raise
                raise IntegrityError(f"{self._digest} has fewer than {self._num_bytes} bytes: {error}") from error

    def _request(self, offset: int, length: int) -> bytes:
        wanted = f"bytes {offset}-{offset + length - 1}/{self._num_bytes}"
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "If-Range": self._etag}
        data = bytearray()
        with self._transport.open("GET", blob_path(self._digest), headers=headers) as response:
            found = (response.status_code, response.headers.get("Content-Range"))
            if found != (206, wanted) or response.headers.get("ETag", self._etag) != self._etag:
                raise BadAnswer(
                    f"asked for {wanted} of {self._digest}, got HTTP {found[0]} with {found[1] or 'no range'}; "
                    "where ranges do not come through, pull or stream the cache"
                )
            for block in response.iter_bytes():
                self._transport.check_open()
                data += block
                if len(data) > length:
                    raise BadAnswer(f"more than {wanted} of {self._digest} came")
        if len(data) < length:
            raise ConnectionFailed(f"{wanted} of {self._digest} ended after {len(data)} bytes")
        return bytes(data)
