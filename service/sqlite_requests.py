"""Requests in SQLite: how a row reads, and the changes that more than one transaction makes."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime
from typing import Any

from ..format_spec import CacheRequest, Code, Fingerprint, ShardDescriptor
from .errors import NotFound
from .meta import CommittedShard, Failure, PutBlob, RequestRow, Skipped, manifest_of
from .schema import SELECT_REQUEST
from .store import Blob

EVERY_SHARD = 100


def now() -> str:
    """Return the time as RFC 3339 text in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_request(db: sqlite3.Connection, request_id: str) -> RequestRow:
    """Return a request; raises NotFound."""
    row = db.execute(SELECT_REQUEST + " WHERE id = ?", (request_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no request {request_id!r}")
    return parse_request(row)


def parse_request(row: sqlite3.Row) -> RequestRow:
    """Return the request in a row of SELECT_REQUEST."""
    shards, shards_done, positions, positions_done, reused, skipped = json.loads(row["progress"])
    planned = row["tokens"] is not None or shards > 0
    fingerprint = row["fingerprint"]
    failure = None if row["error_code"] is None else Failure(Code.from_wire(row["error_code"]), row["error_detail"])
    return RequestRow(
        seq=row["seq"],
        id=row["id"],
        spec=CacheRequest.from_json(json.loads(row["spec"])),
        teacher_name=row["teacher_name"],
        state=row["state"],
        version=row["version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        tokens=row["tokens"],
        sequences=row["sequences"],
        positions=positions,
        positions_done=positions_done or 0,
        shards=shards if planned else None,
        shards_done=shards_done,
        positions_reused=reused or 0,
        fingerprint=None if fingerprint is None else Fingerprint.from_json(json.loads(fingerprint)),
        manifest=row["manifest"],
        tokens_scored=row["tokens_scored"],
        tokens_per_s=row["tokens_per_s"],
        activity=row["activity"],
        skipped=_parse_skipped(skipped),
        owners=tuple(json.loads(row["owners"])),
        failure=failure,
    )


def _parse_skipped(ranges: list[Any]) -> tuple[Skipped, ...]:
    """Read [first sequence, [[number inside the range, error], ...]] of each range that has some."""
    found = [Skipped(first + number, error) for first, skipped in ranges for number, error in skipped]
    return tuple(sorted(found, key=lambda item: item.sequence))


def update(db: sqlite3.Connection, request_id: str, **columns: str | int | float | None) -> None:
    """Set columns of a request and raise its version."""
    sets = "".join(f"{name} = :{name}, " for name in columns)
    db.execute(
        f"UPDATE request SET {sets} version = version + 1, updated_at = :now WHERE id = :id",
        {**columns, "now": now(), "id": request_id},
    )


def lose_leases(db: sqlite3.Connection, request_id: str) -> None:
    """Give back a request's tasks; whoever works on one finds out."""
    db.execute(
        "UPDATE task SET state = 'pending', positions_done = 0, fence = fence + 1, owner = NULL"
        " WHERE request_id = ? AND state = 'leased'",
        (request_id,),
    )


def set_failure(db: sqlite3.Connection, request_id: str, failure: Failure) -> None:
    """Fail a request; its leases are lost."""
    lose_leases(db, request_id)
    update(db, request_id, state="failed", activity=None, error_code=failure.code.wire, error_detail=failure.detail)


def requeue(db: sqlite3.Connection, request_id: str) -> None:
    """Queue a failed or cancelled request again, with all its attempts."""
    db.execute(
        "UPDATE task SET attempts = 0, error = NULL, isolated = 0, reached = NULL, skipped = '[]'"
        " WHERE request_id = ? AND state != 'done'",
        (request_id,),
    )
    update(db, request_id, state="queued", error_code=None, error_detail=None)


def insert_blob(db: sqlite3.Connection, blob: Blob, kind: str) -> None:
    """Record a blob; one that is known keeps its kind."""
    db.execute("INSERT INTO blob VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (blob.digest, blob.bytes, kind))


def write_manifest(db: sqlite3.Connection, request_id: str, put: PutBlob) -> None:
    """Make the newest manifest of a request durable and name it; none while no shard is committed.

    It is built inside the transaction, so that of two commits the second one's manifest holds both shards.
    """
    shards = [
        _parse_shard(row)
        for row in db.execute(
            "SELECT * FROM task WHERE request_id = ? AND number >= 0 AND state = 'done' ORDER BY number", (request_id,)
        )
    ]
    manifest = None
    if shards:
        blob = put(manifest_of(read_request(db, request_id), shards).to_bytes())
        insert_blob(db, blob, "manifest")
        manifest = blob.digest
    update(db, request_id, manifest=manifest, manifest_shards=len(shards))


def manifest_is_due(db: sqlite3.Connection, request_id: str) -> bool:
    """Tell whether enough shards were committed since the newest manifest, or all are.

    It lists every shard, so one with each of ten thousand would be gigabytes: after `EVERY_SHARD` of them there is one
    with every twentieth part more.
    """
    listed, done, total = db.execute(
        "SELECT manifest_shards, (SELECT count(*) FROM task WHERE request_id = ?1 AND number >= 0 AND state = 'done'),"
        " (SELECT count(*) FROM task WHERE request_id = ?1 AND number >= 0) FROM request WHERE id = ?1",
        (request_id,),
    ).fetchone()
    return bool(done == total or done <= EVERY_SHARD or done - listed >= listed // 20)


def _parse_shard(row: sqlite3.Row) -> CommittedShard:
    descriptor = ShardDescriptor(
        digest=row["digest"],
        bytes=row["bytes"],
        first=row["first"],
        sequences=row["sequences"],
        positions=row["positions"],
    )
    return CommittedShard(descriptor, json.loads(row["quality"]))
