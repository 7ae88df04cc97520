"""Errors as HTTP answers: application/problem+json (RFC 9457) with a stable `code`."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from ..format_spec import Code, TeachercacheError
from .errors import RangeNotSatisfied

RETRY_AFTER_S = 5
_BY_STATUS = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED, 413: Code.TOO_LARGE, 503: Code.UNAVAILABLE}

_log = logging.getLogger(__name__)


def problem(code: Code, detail: str, instance: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the answer for an error; `instance` is the path that was asked for."""
    headers = dict(headers or {})
    if code.status == 503:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    if code in (Code.TOO_LARGE, Code.SLOW_BODY):
        # otherwise the rest of the body would be read, only to be thrown away
        headers["Connection"] = "close"
    body = {
        "type": "about:blank",
        "title": HTTPStatus(code.status).phrase,
        "status": code.status,
        "detail": detail,
        "instance": instance,
        "code": code.wire,
        "retryable": code.retryable,
    }
    return JSONResponse(body, code.status, headers, media_type="application/problem+json")


def add_handlers(app: FastAPI) -> None:
    """Answer every error of an app with a problem."""
    app.add_exception_handler(TeachercacheError, _ours)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TeachercacheError)
    if error.code.status >= 500:
        _log.error("%s %s: %s", request.method, request.url.path, error)
    headers = {"Content-Range": f"bytes */{error.size}"} if isinstance(error, RangeNotSatisfied) else None
    return problem(error.code, str(error), request.url.path, headers)


async def _framework(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = _BY_STATUS.get(error.status_code)
    if code is None:
        code = Code.INVALID_REQUEST if error.status_code < 500 else Code.INTERNAL
    detail = {404: "there is nothing at this path", 405: f"{request.method} is not allowed here"}
    return problem(code, detail.get(error.status_code, error.detail), request.url.path, dict(error.headers or {}))


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    detail = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return problem(Code.INVALID_REQUEST, detail, request.url.path)


async def _gone(request: Request, error: Exception) -> JSONResponse:
    return problem(Code.INVALID_REQUEST, "the connection ended before the body did", request.url.path)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(Code.INTERNAL, "the server failed; its log says why", request.url.path)
