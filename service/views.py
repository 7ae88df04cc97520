"""What the API says of a request."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from .meta import RequestRow


class ErrorView(BaseModel):
    """Why a request failed."""

    code: str
    detail: str


class SkippedView(BaseModel):
    """A sequence that the teacher could not score, by its number in the data set."""

    sequence: int
    error: str


class RequestView(BaseModel):
    """A request and its progress; times are RFC 3339 in UTC, `eta_s` is in seconds."""

    id: str
    state: str
    created_at: str
    updated_at: str
    teacher_name: str
    request: dict[str, Any]
    sequences: int | None
    positions_total: int | None
    positions_done: int
    shards_total: int | None
    shards_done: int
    positions_reused: int
    tokens_per_s: float | None
    activity: str | None
    eta_s: float | None
    skipped: list[SkippedView]
    owners: list[str]
    error: ErrorView | None
    manifest: str | None
    teacher_tokens_scored: int


class SubmittedView(RequestView):
    """A request that was just posted; `created` is false when it existed."""

    created: bool


class RequestPage(BaseModel):
    """Some requests, newest first; `next_cursor` leads to older ones."""

    items: list[RequestView]
    next_cursor: str | None


class DryRunView(BaseModel):
    """What a request would cost; `estimated_seconds` is known once its teacher has scored something."""

    id: str
    sequences: int
    positions: int
    estimated_bytes: int
    estimated_seconds: float | None
    exists: bool


def view(row: RequestRow) -> dict[str, Any]:
    """Return the fields of a RequestView."""
    failure = row.failure
    return {
        "id": row.id,
        "state": row.state,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
        "teacher_name": row.teacher_name,
        "request": row.spec.to_json(),
        "sequences": row.sequences,
        "positions_total": row.positions,
        "positions_done": row.positions_done,
        "shards_total": row.shards,
        "shards_done": row.shards_done,
        "positions_reused": row.positions_reused,
        "tokens_per_s": row.tokens_per_s,
        "activity": row.activity,
        "eta_s": _eta(row),
        "skipped": [asdict(item) for item in row.skipped],
        "owners": list(row.owners),
        "error": None if failure is None else {"code": failure.code.wire, "detail": failure.detail},
        "manifest": row.manifest,
        "teacher_tokens_scored": row.tokens_scored,
    }


def _eta(row: RequestRow) -> float | None:
    if row.state != "running" or row.positions is None or not row.tokens_per_s:
        return None
    return (row.positions - row.positions_done) / row.tokens_per_s
