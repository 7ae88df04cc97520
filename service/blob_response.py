"""A stored file as an HTTP answer: ranges, conditions, and exactly its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, MalformedRangeHeader, RangeNotSatisfiable, Response

from .cached_file import CachedFile
from .errors import RangeNotSatisfied

IMMUTABLE = "private, max-age=31536000, immutable"


class BlobResponse(FileResponse):
    """A file sent in chunks of 1 MiB, three to four times as fast as in those of 64 KiB."""

    chunk_size = 2**20

    def _open_file(self) -> Any:
        return CachedFile(Path(self.path))

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            # RFC 9110 section 14.2: a Range that cannot be understood is ignored
            return []
        except RangeNotSatisfiable as error:
            raise RangeNotSatisfied(f"range {http_range!r} is outside the {file_size} bytes", file_size) from error


def blob_response(request: Request, path: Path, digest: str, media_type: str, **headers: str) -> Response:
    """Return the file at `path`, or 304 when the client has it; the ETag is the digest."""
    headers = {"ETag": f'"{digest}"', **{name.replace("_", "-"): value for name, value in headers.items()}}
    if none_match(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return BlobResponse(path, headers=headers, media_type=media_type)


def none_match(request: Request, etag: str) -> bool:
    """Tell whether If-None-Match names the ETag, so that the answer is 304."""
    given = request.headers.get("if-none-match")
    if given is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
    return "*" in tags or etag in tags
