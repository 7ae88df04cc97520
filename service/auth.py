"""Who asks, before anything of a body is read; and a line in the log for everything that is changed.

The server asks for tokens as soon as there is one, and off loopback always. Reading may be left open to anybody.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Forbidden, Unauthenticated
from .problems import problem
from .settings import is_loopback
from .state import State
from .tokens import ANYBODY, SCOPES, Principal, hash_of

# what tells whether a server lives is for machines that hold no token
OPEN_PATHS = {"/healthz", "/readyz", "/v1/version"}
READING = {"GET", "HEAD"}
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="teachercache"'}

_log = logging.getLogger("teachercache.audit")


class Auth:
    """ASGI middleware: finds out who asks, refuses what they may not do, and logs what they change."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its `Principal` in its state."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        principal: Principal | None = None
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                principal = await run_in_threadpool(self._principal, Headers(scope=scope).get("authorization"))
                need(principal, "read" if scope["method"] in READING else "submit")
            except (Unauthenticated, Forbidden) as error:
                headers = CHALLENGE if isinstance(error, Unauthenticated) else None
                answer = problem(error.code, str(error), scope["path"], headers)
                # the body is not read
                answer.headers["Connection"] = "close"
                await answer(scope, receive, watched)
                return
            scope.setdefault("state", {})["principal"] = principal
            await self._app(scope, receive, watched)
        finally:
            if scope["method"] not in READING:
                owner = None if principal is None else principal.owner
                _log.info(
                    json.dumps({"owner": owner, "method": scope["method"], "path": scope["path"], "status": status})
                )

    def _principal(self, header: str | None) -> Principal:
        """Return who asks; raises Unauthenticated."""
        if header is not None:
            kind, _, text = header.partition(" ")
            token = self._state.meta.find_token(hash_of(text.strip())) if kind.lower() == "bearer" else None
            if token is None or not token.is_valid(datetime.now(UTC)):
                raise Unauthenticated("the token is none of this server's, has expired or was revoked")
            return Principal(token.owner, token.scopes, token.expires_at)
        if not self._state.meta.has_tokens() and is_loopback(self._state.settings.host):
            return Principal(ANYBODY, SCOPES)
        if self._state.settings.anonymous_read:
            return Principal(ANYBODY, ("read",))
        raise Unauthenticated("this server asks for a token: set TEACHERCACHE_TOKEN, or send Authorization: Bearer")


def need(principal: Principal, scope: str) -> None:
    """Raise Forbidden, or Unauthenticated where a token would help, unless a scope is there; admin has them all."""
    if scope in principal.scopes or "admin" in principal.scopes:
        return
    if principal.owner == ANYBODY:
        raise Unauthenticated(f"without a token this server lets nobody {scope}: set TEACHERCACHE_TOKEN")
    raise Forbidden(f"the token of {principal.owner} has the scopes {list(principal.scopes)}, and this needs {scope!r}")


def _asking(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


Asking = Annotated[Principal, Depends(_asking)]
