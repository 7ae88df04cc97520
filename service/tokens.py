"""Bearer tokens: who may do what, until when. A token is shown once, when it is made; what is kept is its hash."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from .errors import InvalidSettings

PREFIX = "tc_"
SCOPES = ("read", "submit", "admin")
MAX_OWNER = 64
# 256 random bits cannot be guessed, and need no slow hash
SECRET_BYTES = 32
MIN_SECRET = 32


@dataclass(frozen=True, slots=True)
class Token:
    """A token's record; `id` is the part of it that may be shown, `expires_at` RFC 3339 text in UTC."""

    id: str
    owner: str
    scopes: tuple[str, ...]
    created_at: str
    expires_at: str | None = None
    revoked: bool = False

    def is_valid(self, at: datetime) -> bool:
        """Whether it opens anything."""
        return not self.revoked and (self.expires_at is None or at < datetime.fromisoformat(self.expires_at))


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: the owner of a token, or nobody in particular."""

    owner: str
    scopes: tuple[str, ...]
    expires_at: str | None = None


ANYBODY = "anonymous"


def make_token(owner: str, scopes: list[str], days: float | None) -> tuple[Token, str]:
    """Return a token's record and the token.

    Raises:
        InvalidSettings: a name or scope that cannot be, or no time to live.
    """
    if not owner.isprintable() or not owner.strip() or len(owner) > MAX_OWNER or owner == ANYBODY:
        raise InvalidSettings(f"owner {owner!r} is not 1 to {MAX_OWNER} printable characters, or is {ANYBODY!r}")
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise InvalidSettings(f"unknown scope {unknown[0]!r}; known: {list(SCOPES)}")
    if days is not None and not 0 < days <= 36_500:
        raise InvalidSettings(f"a token lives for more than 0 and at most 36500 days, not {days}")
    identity, now = secrets.token_hex(4), datetime.now(UTC)
    expires = None if days is None else (now + timedelta(days=days)).isoformat(timespec="seconds")
    token = Token(identity, owner, tuple(sorted(set(scopes))), now.isoformat(timespec="seconds"), expires)
    return token, f"{PREFIX}{identity}_{secrets.token_urlsafe(SECRET_BYTES)}"


def hash_of(text: str) -> str:
    """Return what of a token is kept. It is looked up by this: what a comparison's time tells is of no use."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
