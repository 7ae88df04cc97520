"""What the server is and how it fares."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .. import __version__
from ..format_spec import FORMAT_VERSION, Code, TeachercacheError
from .auth import Asking
from .problems import problem
from .state import Server, State

router = APIRouter(tags=["server"])


@router.get("/healthz")
def get_health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.get("/readyz")
def get_readiness(server: Server) -> JSONResponse:
    """Say whether requests can be taken and worked on, check by check."""
    checks = [_database(server), _disk(server), _worker(server)]
    failed = [check["name"] for check in checks if not check["ok"]]
    if not failed:
        return JSONResponse({"status": "ready", "checks": checks})
    answer = problem(Code.UNAVAILABLE, f"not ready: {', '.join(failed)}", "/readyz")
    body = {**json.loads(bytes(answer.body)), "checks": checks}
    return JSONResponse(body, answer.status_code, {"Retry-After": answer.headers["Retry-After"]}, answer.media_type)


@router.get("/metrics", response_class=Response)
def get_metrics(request: Request) -> Response:
    """Return the server's metrics as Prometheus reads them."""
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/version")
def get_version() -> dict[str, str]:
    """Return the versions of the server and of the format that it writes."""
    return {"version": __version__, "format_version": FORMAT_VERSION}


@router.get("/v1/whoami")
def get_whoami(asking: Asking) -> dict[str, Any]:
    """Say whose token came with the request, and what it allows."""
    return {"owner": asking.owner, "scopes": list(asking.scopes), "expires_at": asking.expires_at}


@router.get("/v1/teachers", tags=["teachers"])
def get_teachers(server: Server) -> dict[str, list[dict[str, Any]]]:
    """List the teachers that requests may name."""
    return {"items": [teacher.to_json() for teacher in server.teachers.all]}


def _database(server: State) -> dict[str, Any]:
    try:
        server.meta.probe()
    except TeachercacheError as error:
        return {"name": "database", "ok": False, "detail": str(error)}
    return {"name": "database", "ok": True, "detail": "written and synced"}


def _disk(server: State) -> dict[str, Any]:
    free = server.store.free_bytes()
    return {"name": "disk", "ok": free > 0, "detail": f"{max(free, 0)} bytes free above the reserve"}


def _worker(server: State) -> dict[str, Any]:
    return {"name": "worker", "ok": server.supervisor.ready, "detail": server.supervisor.state}
