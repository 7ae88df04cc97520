"""Cache requests: submit, watch, retry."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..format_spec import CacheRequest, RequestError, Submission
from .auth import Asking
from .blob_response import blob_response, none_match
from .engine_choice import GENERATES
from .errors import Draining, InvalidJson, JobFailed, NoManifestYet, NotFound, UnsupportedMediaType
from .meta import RequestRow
from .repair import checked_path
from .sizing import estimate_bytes, measure
from .state import Server, State
from .teachers import Teacher
from .tokens import ANYBODY
from .views import DryRunView, RequestPage, RequestView, SubmittedView, view

MAX_PAGE = 200

router = APIRouter(prefix="/v1/requests", tags=["requests"])


@router.post("", status_code=202, response_model=SubmittedView | DryRunView)
async def submit(request: Request, server: Server, asking: Asking, dry_run: bool = False) -> JSONResponse:
    """Ask for a cache: 202 when the request is new, 200 when the same one exists, or with `dry_run`."""
    submission = Submission.from_json(await _json(request))
    if server.supervisor.draining:
        raise Draining("the server is shutting down; post the request again when it is back")
    if dry_run:
        return await run_in_threadpool(_size_up, server, submission)
    return await run_in_threadpool(_submit, server, submission, asking.owner)


@router.get("")
def get_requests(
    server: Server, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50, cursor: str | None = None
) -> RequestPage:
    """List requests, newest first."""
    if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise RequestError(f"cursor {cursor!r} is none that this server gave out")
    rows = server.meta.requests(limit + 1, None if cursor is None else int(cursor))
    items = [RequestView(**view(row)) for row in rows[:limit]]
    return RequestPage(items=items, next_cursor=str(rows[limit - 1].seq) if len(rows) > limit else None)


@router.get("/{request_id}", response_model=RequestView)
def get_request(request_id: str, request: Request, server: Server) -> Response:
    """Return a request and its progress."""
    row = server.meta.request(request_id)
    headers = {"ETag": f'"{row.version}"', "Cache-Control": "no-cache"}
    if none_match(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return JSONResponse(view(row), headers=headers)


@router.post("/{request_id}/retry", status_code=202, response_model=RequestView)
def retry(request_id: str, server: Server) -> JSONResponse:
    """Queue a failed request again; its committed shards stay."""
    if server.supervisor.draining:
        raise Draining("the server is shutting down; retry when it is back")
    row = server.meta.retry(request_id)
    server.supervisor.wake()
    return JSONResponse(view(row), 202)


@router.post("/{request_id}/cancel", response_model=RequestView)
def cancel(request_id: str, server: Server, asking: Asking) -> JSONResponse:
    """Take back what one asked for; work on it ends when nobody wants it any more, and what is done stays."""
    everybody = "admin" in asking.scopes and asking.owner != ANYBODY
    return JSONResponse(view(server.meta.cancel(request_id, asking.owner, everybody=everybody)))


@router.head("/{request_id}/manifest", include_in_schema=False)
@router.get("/{request_id}/manifest")
def get_newest_manifest(request_id: str, request: Request, server: Server) -> Response:
    """Return the newest committed manifest of a request, which is partial while the teacher runs."""
    row = server.meta.request(request_id)
    if row.manifest is None:
        if row.failure is not None:
            raise JobFailed(f"the request failed ({row.failure.code.wire}): {row.failure.detail}")
        raise NoManifestYet(f"the request is {row.state}; no shard is committed yet")
    path = checked_path(row.manifest, server.store, server.meta)
    location = f"/v1/manifests/{row.manifest}"
    headers = {"Cache_Control": "no-cache", "Content_Location": location}
    return blob_response(request, path, row.manifest, "application/json", **headers)


async def _json(request: Request) -> Any:
    # a page of another site can make a browser post anything else to a server on loopback
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(f"a request is posted with Content-Type application/json, not {media_type!r}")
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise InvalidJson(f"the body is not JSON: {error}") from error


def _resolve(server: State, submission: Submission) -> tuple[CacheRequest, Teacher]:
    teacher = server.teachers.find(submission.teacher)
    spec = submission.resolve(
        teacher=teacher.digest,
        vocab_size=teacher.vocab_size,
        engine=teacher.engine,
        dtype=teacher.dtype,
        head_dtype=teacher.head_dtype,
        draws_tail_samples=teacher.draws_tail_samples,
        generates=GENERATES[teacher.engine],
    )
    return spec, teacher


def _require_data(server: State, digest: str) -> None:
    if server.meta.blob_kind(digest) is None:
        raise NotFound(f"the data set {digest} is not on this server; upload it with PUT /v1/blobs/{digest}")


def _submit(server: State, submission: Submission, owner: str) -> JSONResponse:
    spec, teacher = _resolve(server, submission)
    known = _known(server, spec.id)
    if known is None or known.state in ("failed", "cancelled"):
        _require_data(server, spec.data)
    row, created = server.meta.submit(spec, teacher.name, owner)
    server.supervisor.wake()
    headers = {"Location": f"/v1/requests/{row.id}"}
    return JSONResponse({**view(row), "created": created}, 202 if created else 200, headers)


def _size_up(server: State, submission: Submission) -> JSONResponse:
    spec, teacher = _resolve(server, submission)
    known = _known(server, spec.id)
    if known is not None and known.sequences is not None and known.positions is not None:
        sequences, positions = known.sequences, known.positions
    else:
        _require_data(server, spec.data)
        dataset = checked_path(spec.data, server.store, server.meta)
        sequences, positions = measure(dataset, teacher.limits, spec.generate)
    rate = server.meta.rate(spec.teacher, spec.engine, spec.dtype) if spec.generate is None else None
    answer = DryRunView(
        id=spec.id,
        sequences=sequences,
        positions=positions,
        estimated_bytes=estimate_bytes(positions, spec),
        estimated_seconds=None if rate is None else positions / rate,
        exists=known is not None,
    )
    return JSONResponse(answer.model_dump())


def _known(server: State, request_id: str) -> RequestRow | None:
    try:
        return server.meta.request(request_id)
    except NotFound:
        return None
