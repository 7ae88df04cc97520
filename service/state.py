"""What the routes of the API work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from .meta import Meta
from .settings import Settings
from .store import Store
from .supervisor import Supervisor
from .teachers import Teachers


@dataclass(frozen=True, slots=True)
class State:
    """The parts of a running server."""

    settings: Settings
    store: Store
    meta: Meta
    teachers: Teachers
    supervisor: Supervisor


def _state(request: Request) -> State:
    state: State = request.app.state.server
    return state


Server = Annotated[State, Depends(_state)]
