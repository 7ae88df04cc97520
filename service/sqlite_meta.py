"""The records of one data directory in SQLite."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from ..format_spec import CacheRequest, Code, digest_file
from .database import Database
from .errors import Forbidden, JobFailed, Unavailable
from .meta import ACTIVE, PLAN, Failure, PutBlob, RequestRow, Totals
from .schema import SCHEMA, SELECT_REQUEST, VERSION
from .sqlite_requests import (
    insert_blob,
    lose_leases,
    now,
    parse_request,
    read_request,
    requeue,
    set_failure,
    update,
    write_manifest,
)
from .sqlite_tasks import SqliteTasks
from .sqlite_tokens import SqliteTokens
from .store import Blob
from .tokens import ANYBODY

_log = logging.getLogger(__name__)


class SqliteMeta(SqliteTasks, SqliteTokens):
    """`Meta` in a database file on a local file system: write-ahead log, every commit synced."""

    def __init__(self, path: Path) -> None:
        super().__init__(Database(path, SCHEMA, VERSION))

    def submit(self, spec: CacheRequest, teacher_name: str, owner: str = ANYBODY) -> tuple[RequestRow, bool]:
        """Return the request, of which `owner` is now one, and whether it is new; see `Meta.submit`."""
        at = now()
        with self._db.write() as db:
            created = db.execute(
                "INSERT INTO request (id, spec, teacher_name, state, created_at, updated_at)"
                " VALUES (?, ?, ?, 'queued', ?, ?) ON CONFLICT DO NOTHING",
                (spec.id, spec.canonical().decode(), teacher_name, at, at),
            ).rowcount
            if created:
                db.execute(
                    "INSERT INTO task (request_id, number, first, sequences, positions) VALUES (?, ?, 0, 0, 0)",
                    (spec.id, PLAN),
                )
            db.execute("INSERT INTO interest VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (spec.id, owner, at))
            row = read_request(db, spec.id)
            damaged = row.failure is not None and row.failure.code is Code.CORRUPT
            if damaged or row.state == "cancelled":
                requeue(db, spec.id)
                row = read_request(db, spec.id)
        return row, bool(created)

    def request(self, request_id: str) -> RequestRow:
        """Return a request; raises NotFound."""
        return read_request(self._db.connection, request_id)

    def requests(self, limit: int, before: int | None = None) -> list[RequestRow]:
        """Return requests, newest first, those with `seq` below `before`."""
        rows = self._db.connection.execute(
            SELECT_REQUEST + " WHERE ?1 IS NULL OR seq < ?1 ORDER BY seq DESC LIMIT ?2", (before, limit)
        )
        return [parse_request(row) for row in rows]

    def retry(self, request_id: str) -> RequestRow:
        """Queue a failed request again; raises NotFound, JobFailed when it has not failed."""
        with self._db.write() as db:
            row = read_request(db, request_id)
            if row.state != "failed":
                raise JobFailed(f"request {request_id} is {row.state}; only a failed one can be retried")
            requeue(db, request_id)
            return read_request(db, request_id)

    def cancel(self, request_id: str, owner: str, *, everybody: bool = False) -> RequestRow:
        """Take back an owner's interest, or everybody's; see `Meta.cancel`."""
        with self._db.write() as db:
            row = read_request(db, request_id)
            if not everybody and owner not in row.owners:
                raise Forbidden(f"request {request_id} is one of {', '.join(row.owners) or 'nobody'}, not of {owner}")
            gone = row.owners if everybody else (owner,)
            db.executemany(
                "DELETE FROM interest WHERE request_id = ? AND owner = ?", [(request_id, name) for name in gone]
            )
            if row.state in ACTIVE and set(gone) == set(row.owners):
                lose_leases(db, request_id)
                update(db, request_id, state="cancelled", activity=None)
            return read_request(db, request_id)

    def damaged(self, digest: str, put: PutBlob) -> None:
        """Forget a blob that is lost, and mark whatever was made of it to be made again."""
        with self._db.write() as db:
            db.execute("DELETE FROM blob WHERE digest = ?", (digest,))
            self._lose_shards(db, digest, put)
            lost = [row["id"] for row in db.execute("SELECT id FROM request WHERE tokens = ?", (digest,))]
            for request_id in lost:
                db.execute("UPDATE task SET state = 'pending' WHERE request_id = ? AND number = ?", (request_id, PLAN))
                update(db, request_id, tokens=None)
            for row in db.execute("SELECT id FROM request WHERE manifest = ?", (digest,)).fetchall():
                write_manifest(db, row["id"], put)

    def rate(self, teacher: str, engine: str, dtype: str) -> float | None:
        """Return the tokens per second of the last shard that this teacher scored."""
        row = self._db.one(
            "SELECT tokens_per_s FROM rate WHERE teacher = ? AND engine = ? AND dtype = ?", teacher, engine, dtype
        )
        return None if row is None else float(row["tokens_per_s"])

    def totals(self) -> Totals:
        """Return sums over all requests and blobs."""
        db = self._db.connection
        return Totals(
            requests={row[0]: row[1] for row in db.execute("SELECT state, count(*) FROM request GROUP BY state")},
            tokens_scored=db.execute("SELECT coalesce(sum(tokens_scored), 0) FROM request").fetchone()[0],
            tokens_reused=db.execute("SELECT coalesce(sum(positions), 0) FROM task WHERE reused").fetchone()[0],
            bytes={row[0]: row[1] for row in db.execute("SELECT kind, sum(bytes) FROM blob GROUP BY kind")},
        )

    def add_blob(self, blob: Blob, kind: str) -> None:
        """Record a blob that is durable."""
        with self._db.write() as db:
            insert_blob(db, blob, kind)

    def blobs(self) -> dict[str, int]:
        """Return the size in bytes of every blob that is recorded."""
        return {row["digest"]: row["bytes"] for row in self._db.connection.execute("SELECT digest, bytes FROM blob")}

    def blob_kind(self, digest: str) -> str | None:
        """Return "upload", "tokens", "shard" or "manifest", None for an unknown digest."""
        row = self._db.one("SELECT kind FROM blob WHERE digest = ?", digest)
        return None if row is None else str(row["kind"])

    def file_digest(self, path: Path) -> str:
        """Return the digest of a file, from memory while its size and modification time stay."""
        stat = path.stat()
        row = self._db.one(
            "SELECT digest FROM file_digest WHERE path = ? AND size = ? AND mtime_ns = ?",
            str(path),
            stat.st_size,
            stat.st_mtime_ns,
        )
        if row is not None:
            return str(row["digest"])
        _log.info("hashing %s, %d bytes", path, stat.st_size)
        digest = digest_file(path)
        with self._db.write() as db:
            db.execute(
                "INSERT OR REPLACE INTO file_digest VALUES (?, ?, ?, ?)",
                (str(path), stat.st_size, stat.st_mtime_ns, digest),
            )
        return digest

    def probe(self) -> None:
        """Write and sync; raises Unavailable."""
        try:
            with self._db.write() as db:
                db.execute("INSERT OR REPLACE INTO probe VALUES (1, ?)", (now(),))
        except sqlite3.Error as error:
            raise Unavailable(f"the database cannot be written: {error}") from error

    def _lose_shards(self, db: sqlite3.Connection, digest: str, put: PutBlob) -> None:
        for task in db.execute("SELECT * FROM task WHERE digest = ?", (digest,)).fetchall():
            request_id = task["request_id"]
            db.execute(
                "UPDATE task SET state = 'pending', reused = 0, positions_done = 0, digest = NULL, bytes = NULL,"
                " quality = NULL WHERE request_id = ? AND number = ?",
                (request_id, task["number"]),
            )
            write_manifest(db, request_id, put)
            if read_request(db, request_id).state == "complete":
                detail = f"shard {task['number']} ({digest}) was damaged on disk and set aside; a retry makes it again"
                set_failure(db, request_id, Failure(Code.CORRUPT, detail))
