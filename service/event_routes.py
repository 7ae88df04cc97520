"""A request's progress as server-sent events, for those who would rather be told than ask."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .meta import ACTIVE
from .state import Server, State
from .views import view

EVERY_S = 1.0
# between two looks at whether the server ends
LOOK_S = 0.2
# proxies close what is silent for long
BEAT_S = 15.0

router = APIRouter(prefix="/v1/requests", tags=["requests"])


@router.get("/{request_id}/events", response_class=StreamingResponse)
async def get_events(request_id: str, request: Request, server: Server) -> Response:
    """Send a view whenever the request has changed, at most once a second, until it is over or the server ends.

    `Last-Event-ID` is the version that was seen last; 204 when that was the end, which tells a browser to stay away.
    """
    row = await run_in_threadpool(server.meta.request, request_id)
    seen = request.headers.get("last-event-id")
    if seen == str(row.version) and row.state not in ACTIVE:
        return Response(status_code=204)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(server, request_id, seen), media_type="text/event-stream", headers=headers)


async def _events(server: State, request_id: str, seen: str | None) -> AsyncIterator[str]:
    said = time.monotonic()
    while True:
        row = await run_in_threadpool(server.meta.request, request_id)
        if str(row.version) != seen:
            seen, said = str(row.version), time.monotonic()
            yield _event("progress" if row.state in ACTIVE else row.state, view(row), seen)
            if row.state not in ACTIVE:
                return
        elif time.monotonic() - said > BEAT_S:
            said = time.monotonic()
            yield ": nothing new\n\n"
        until = time.monotonic() + EVERY_S
        while time.monotonic() < until:
            if server.supervisor.draining:
                yield _event("server_shutdown", {"detail": "the server ends; connect again when it is back"}, seen)
                return
            await asyncio.sleep(LOOK_S)


def _event(name: str, data: Any, number: str) -> str:
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(data)}\n\n"
