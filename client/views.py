"""What the server says of its requests and teachers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from .errors import BadAnswer, RequestFailed

View = TypeVar("View", "RequestView", "Estimate", "Teacher")

COMPLETE, FAILED, CANCELLED = "complete", "failed", "cancelled"


@dataclass(frozen=True, slots=True)
class RequestView:
    """A cache request as the server sees it.

    `state` goes queued, validating, running, then complete or failed. `created` tells whether the
    submission made it; None where nobody submitted. Counts are None until the data was looked at.
    """

    id: str
    state: str
    teacher_name: str
    request: dict[str, Any]
    created_at: str
    updated_at: str
    sequences: int | None
    positions_total: int | None
    positions_done: int
    shards_total: int | None
    shards_done: int
    teacher_tokens_scored: int
    manifest: str | None
    positions_reused: int = 0
    tokens_per_s: float | None = None
    eta_s: float | None = None
    activity: str | None = None
    skipped: tuple[dict[str, Any], ...] | list[dict[str, Any]] = ()
    owners: tuple[str, ...] | list[str] = ()
    error: dict[str, str] | None = None
    created: bool | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing will change any more by itself."""
        return self.state in (COMPLETE, FAILED, CANCELLED)

    def raise_if_failed(self) -> None:
        """Raise RequestFailed when this request has failed, or was cancelled."""
        if self.state == CANCELLED:
            raise RequestFailed(self.id, CANCELLED, "whoever wanted it has taken it back; submit it again to go on")
        if self.state == FAILED:
            error = self.error or {}
            raise RequestFailed(self.id, error.get("code", "internal"), error.get("detail", "no reason given"))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that the server sent."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> RequestView:
        """Read the server's answer; keys that a newer server adds are left out."""
        return _read(cls, value)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a submission would cost; `exists` when its cache is there already and it costs nothing."""

    id: str
    sequences: int
    positions: int
    estimated_bytes: int
    estimated_seconds: float | None
    exists: bool

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that the server sent."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Estimate:
        """Read the server's answer."""
        return _read(cls, value)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher that the server runs; `tail_samples` tells whether its engine can draw them."""

    name: str
    digest: str
    tokenizer: str
    vocab_size: int
    max_length: int
    engine: str
    dtype: str
    head_dtype: str
    tail_samples: bool

    @classmethod
    def from_json(cls, value: Any) -> Teacher:
        """Read the server's answer."""
        return _read(cls, value)


def _read(cls: type[View], value: Any) -> View:
    names = {field.name for field in fields(cls)}
    try:
        return cls(**{name: item for name, item in value.items() if name in names})
    except (AttributeError, TypeError) as error:
        raise BadAnswer(f"the server's {cls.__name__} lacks what this client needs: {error}") from error
