"""The HTTP API as an ASGI app; it imports no engine and nothing that computes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from .. import __version__
from . import blob_routes, event_routes, health_routes, request_routes
from .auth import Auth
from .body_limit import BodyLimit
from .metrics import Measured, Metrics
from .problems import add_handlers
from .state import State


def create_app(state: State) -> FastAPI:
    """Return the app of a server; its worker process lives as long as the app does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(state.supervisor.start)
        yield
        await run_in_threadpool(state.supervisor.stop, state.settings.drain_seconds)

    # no pages of documentation: they load scripts from elsewhere
    app = FastAPI(title="teachercache", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    add_handlers(app)
    app.state.metrics = Metrics(state)
    limits = {"upload_limit": state.settings.upload_limit, "seconds": state.settings.body_seconds}
    app.add_middleware(BodyLimit, **limits)
    app.add_middleware(Auth, state=state)
    app.add_middleware(Measured, metrics=app.state.metrics)
    for routes in (blob_routes, request_routes, event_routes, health_routes):
        app.include_router(routes.router)
    return app
