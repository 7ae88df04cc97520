"""Limits on request bodies that hold while they stream, whatever their headers say."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import SlowBody, TooLarge
from .problems import problem

MAX_JSON_BYTES = 2**20


class BodyLimit:
    """ASGI middleware: uploads (PUT) may have `upload_limit` bytes, every other body `MAX_JSON_BYTES`.

    Of a body that is waited for, some must come within `seconds`.
    """

    def __init__(self, app: ASGIApp, upload_limit: int, seconds: float) -> None:
        self._app = app
        self._upload_limit = upload_limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a `receive` that raises TooLarge and SlowBody."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._upload_limit if scope["method"] == "PUT" else MAX_JSON_BYTES
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            error = _too_large(int(declared), limit)
            await problem(error.code, str(error), scope["path"])(scope, receive, send)
            return
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                # what is waited for now is that the client goes away
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._seconds)
            except TimeoutError as error:
                raise SlowBody(
                    f"nothing of the body came for {self._seconds:g} s, after {received} bytes; send it again"
                ) from error
            complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(received, limit)
            return message

        await self._app(scope, limited, send)


def _too_large(size: int, limit: int) -> TooLarge:
    return TooLarge(f"a body of {size} bytes or more is above the limit of {limit}")
