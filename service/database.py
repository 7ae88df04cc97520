"""A SQLite database of ours: one connection a thread, every write transaction immediate and synced."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import InvalidSettings

BUSY_TIMEOUT_S = 30.0


class Database:
    """Connections to the database at `path`, which is made with `schema` where it is not there yet.

    Raises:
        InvalidSettings: the file is not a database, or one of a newer version.
    """

    def __init__(self, path: Path, schema: str, version: int) -> None:
        self._path = path
        self._local = threading.local()
        try:
            found = self._prepare(schema, version)
        except sqlite3.DatabaseError as error:
            raise InvalidSettings(f"{path} cannot be used as the database: {error}") from error
        if found != version:
            raise InvalidSettings(f"{path} has schema version {found}, this program knows {version}")

    @property
    def connection(self) -> sqlite3.Connection:
        """This thread's connection."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            self._local.connection = connection
        return connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction; a deferred one would fail at once when it turns from reading to writing."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query."""
        row: sqlite3.Row | None = self.connection.execute(sql, values).fetchone()
        return row

    def _prepare(self, schema: str, version: int) -> int:
        with self.write() as connection:
            found: int = connection.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                for statement in schema.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version}")
                found = version
        return found
