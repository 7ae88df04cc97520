"""Blobs and manifests by digest."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..format_spec import DatasetError, RequestError, is_digest
from .blob_response import IMMUTABLE, blob_response
from .errors import CorruptBlob, DigestMismatch, LengthRequired, NotFound
from .repair import checked_path
from .state import Server, State
from .store import Blob, Store

PARQUET_MAGIC = b"PAR1"
WRITE_BYTES = 2**20

router = APIRouter(prefix="/v1", tags=["blobs"])


@router.put("/blobs/{digest}", status_code=201)
async def put_blob(digest: str, request: Request, server: Server) -> JSONResponse:
    """Upload a data set under its digest; 201 when it is new, 200 when it is there already."""
    if not is_digest(digest):
        raise RequestError(f"{digest!r} is not a digest (sha256:<64 hex digits>)")
    length = request.headers.get("content-length")
    if length is None:
        raise LengthRequired("an upload needs a Content-Length")
    size = await run_in_threadpool(_intact_size, server, digest)
    if size is not None:
        return JSONResponse({"digest": digest, "bytes": size})
    blob = await receive(request.stream(), digest, int(length), server.store)
    await run_in_threadpool(server.meta.add_blob, blob, "upload")
    return JSONResponse({"digest": blob.digest, "bytes": blob.bytes}, 201)


@router.head("/blobs/{digest}", include_in_schema=False)
@router.get("/blobs/{digest}")
def get_blob(digest: str, request: Request, server: Server) -> Response:
    """Return a blob; its bytes were verified since they last changed."""
    path = checked_path(digest, server.store, server.meta)
    return blob_response(request, path, digest, "application/octet-stream", Cache_Control=IMMUTABLE)


@router.head("/manifests/{digest}", include_in_schema=False)
@router.get("/manifests/{digest}")
def get_manifest(digest: str, request: Request, server: Server) -> Response:
    """Return a manifest, byte for byte."""
    if server.meta.blob_kind(digest) != "manifest":
        raise NotFound(f"there is no manifest {digest!r}")
    path = checked_path(digest, server.store, server.meta)
    return blob_response(request, path, digest, "application/json", Cache_Control=IMMUTABLE)


async def receive(body: AsyncIterator[bytes], digest: str, length: int, store: Store) -> Blob:
    """Store a streamed data set of `length` bytes.

    Raises:
        DatasetError: it does not begin and end as Parquet does.
        DigestMismatch: the bytes are others than promised, or fewer.
        InsufficientStorage: they do not fit.
    """
    with store.stage(length) as staging:
        last = b""
        async for block in _blocks(body):
            if not staging.bytes and not block.startswith(PARQUET_MAGIC):
                raise DatasetError("the upload does not begin as a Parquet file does")
            await run_in_threadpool(staging.write, block)
            last = (last + block)[-len(PARQUET_MAGIC) :]
        if staging.bytes != length:
            raise DigestMismatch(f"{staging.bytes} bytes came, Content-Length promised {length}")
        if staging.bytes < 2 * len(PARQUET_MAGIC) or last != PARQUET_MAGIC:
            raise DatasetError(f"the upload of {length} bytes does not end as a Parquet file does")
        return await run_in_threadpool(staging.commit, digest)


async def _blocks(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the body in blocks of about `WRITE_BYTES`, so that few switches of thread are needed."""
    buffer = bytearray()
    async for chunk in body:
        buffer += chunk
        if len(buffer) >= WRITE_BYTES:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def _intact_size(server: State, digest: str) -> int | None:
    """Return the size of a blob that need not be uploaded again."""
    try:
        return checked_path(digest, server.store, server.meta).stat().st_size
    except (NotFound, CorruptBlob):
        return None
