"""Limits on request bodies that hold while they stream, whatever their headers say."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import TooLarge
from .problems import problem

MAX_JSON_BYTES = 2**20


class BodyLimit:
    """ASGI middleware: uploads (PUT) may have `upload_limit` bytes, every other body `MAX_JSON_BYTES`."""

    def __init__(self, app: ASGIApp, upload_limit: int) -> None:
        self._app = app
        self._upload_limit = upload_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a `receive` that raises TooLarge."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._upload_limit if scope["method"] == "PUT" else MAX_JSON_BYTES
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            error = _too_large(int(declared), limit)
            await problem(error.code, str(error), scope["path"])(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(received, limit)
            return message

        await self._app(scope, limited, send)


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(f"a body of {size} bytes or more is above the limit of {limit}")
