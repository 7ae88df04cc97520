"""Tokens in SQLite."""

from __future__ import annotations

import json
import sqlite3

from .database import Database
from .errors import NotFound
from .tokens import Token


class SqliteTokens:
    """The part of `Meta` that knows who may do what."""

    _db: Database

    def add_token(self, token: Token, digest: str) -> None:
        """Record a token and the hash of it."""
        with self._db.write() as db:
            db.execute(
                "INSERT INTO token VALUES (?, ?, ?, ?, ?, ?, 0)",
                (token.id, token.owner, json.dumps(token.scopes), digest, token.created_at, token.expires_at),
            )

    def tokens(self) -> list[Token]:
        """Return all tokens, the oldest first."""
        return [_parse(row) for row in self._db.connection.execute("SELECT * FROM token ORDER BY created_at, id")]

    def find_token(self, digest: str) -> Token | None:
        """Return the token with this hash."""
        row = self._db.one("SELECT * FROM token WHERE hash = ?", digest)
        return None if row is None else _parse(row)

    def has_tokens(self) -> bool:
        """Whether there is one, valid or not."""
        return self._db.one("SELECT 1 FROM token LIMIT 1") is not None

    def revoke_token(self, token_id: str) -> Token:
        """Make a token open nothing any more; raises NotFound."""
        with self._db.write() as db:
            if not db.execute("UPDATE token SET revoked = 1 WHERE id = ?", (token_id,)).rowcount:
                raise NotFound(f"there is no token {token_id!r}")
            return _parse(db.execute("SELECT * FROM token WHERE id = ?", (token_id,)).fetchone())


def _parse(row: sqlite3.Row) -> Token:
    return Token(
        row["id"],
        row["owner"],
        tuple(json.loads(row["scopes"])),
        row["created_at"],
        row["expires_at"],
        bool(row["revoked"]),
    )
