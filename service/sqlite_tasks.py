"""Tasks in SQLite: leases with fences, and the commits that need one."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import Any

from ..format_spec import Code, Fingerprint, canonical_json
from .database import Database
from .errors import LeaseLost
from .meta import (
    ACTIVE,
    MAX_ATTEMPTS,
    MAX_SKIPPED_SHARE,
    PLAN,
    CommittedShard,
    Failure,
    Lease,
    Plan,
    PutBlob,
    Range,
    shard_key,
)
from .schema import NEXT_TASKS
from .sqlite_requests import insert_blob, manifest_is_due, read_request, set_failure, update, write_manifest

# ?1 is the error, ?2 what is taken off the attempts
_FREE = "state = 'pending', positions_done = 0, owner = NULL, error = coalesce(?1, error), attempts = attempts - ?2"


class SqliteTasks:
    """The part of `Meta` that a worker and its supervisor use."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def lease(self, owner: str, seconds: float) -> Lease | None:
        """Lease the next task: plans before ranges, older requests first; see `Meta.lease`."""
        with self._db.write() as db:
            while (task := _next_task(db)) is not None:
                if task["attempts"] < MAX_ATTEMPTS:
                    return _take(db, task, owner, seconds)
                _out_of_attempts(db, task)
        return None

    def reach(self, lease: Lease, number: int) -> None:
        """Record that a range is being scored (-1), or which sequence of an isolated one; each has its own attempts."""
        with self._db.write() as db:
            _held(db, lease)
            db.execute(
                "UPDATE task SET reached = ?1, attempts = 1 WHERE request_id = ?2 AND number = ?3"
                " AND (reached IS NULL OR reached < ?1)",
                (number, lease.request.id, lease.number),
            )

    def renew(
        self,
        lease: Lease,
        seconds: float,
        positions_done: int = 0,
        tokens_per_s: float | None = None,
        activity: str | None = None,
    ) -> None:
        """Extend a lease and record progress; raises LeaseLost."""
        with self._db.write() as db:
            before = _held(db, lease)["positions_done"]
            db.execute(
                "UPDATE task SET expires_at = ?, positions_done = ? WHERE request_id = ? AND number = ?",
                (time.time() + seconds, positions_done, lease.request.id, lease.number),
            )
            _count(db, lease.request.id, positions_done - before, tokens_per_s, activity)

    def release(self, lease: Lease, error: str | None = None) -> None:
        """Give a task back; with an error the attempt counts. Nothing happens when the lease is lost."""
        with self._db.write() as db:
            db.execute(
                f"UPDATE task SET {_FREE} WHERE request_id = ?3 AND number = ?4 AND fence = ?5 AND state = 'leased'",
                (error, int(error is None), lease.request.id, lease.number, lease.fence),
            )
            _given_back(db, lease.request.id)

    def fail(self, lease: Lease, failure: Failure) -> None:
        """Fail a lease's request, whose leases are all lost. Nothing happens when this one was lost before."""
        with self._db.write() as db:
            if _find(db, lease) is not None:
                set_failure(db, lease.request.id, failure)

    def release_owner(self, owner: str | None, error: str | None) -> int:
        """Take back all leases of a dead owner, or of all owners, as `release` does; return how many."""
        with self._db.write() as db:
            held = db.execute(
                "SELECT DISTINCT request_id FROM task WHERE state = 'leased' AND (?1 IS NULL OR owner = ?1)", (owner,)
            ).fetchall()
            count = db.execute(
                f"UPDATE task SET {_FREE} WHERE state = 'leased' AND (?3 IS NULL OR owner = ?3)",
                (error, int(error is None), owner),
            ).rowcount
            for row in held:
                _given_back(db, row["request_id"])
        return count

    def commit_plan(self, lease: Lease, plan: Plan, put: PutBlob) -> None:
        """Record a plan and its ranges; ranges that stayed the same keep their shards. Raises LeaseLost.

        A range of which another request has made a shard, with the same settings, takes that one.
        """
        request_id = lease.request.id
        with self._db.write() as db:
            _held(db, lease)
            found = db.execute(
                "SELECT first, sequences FROM task WHERE request_id = ? AND number >= 0 ORDER BY number", (request_id,)
            )
            # a shard of completions has fewer positions than were planned
            if [tuple(row) for row in found] != [(part.first, part.sequences) for part in plan.ranges]:
                db.execute("DELETE FROM task WHERE request_id = ? AND number >= 0", (request_id,))
                db.executemany(
                    "INSERT INTO task (request_id, number, first, sequences, positions, shard_key)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (request_id, i, part.first, part.sequences, part.positions, shard_key(lease.request.spec, part))
                        for i, part in enumerate(plan.ranges)
                    ],
                )
            db.execute(
                "UPDATE task SET state = 'done', owner = NULL WHERE request_id = ? AND number = ?", (request_id, PLAN)
            )
            insert_blob(db, plan.tokens, "tokens")
            update(db, request_id, state="running", tokens=plan.tokens.digest, sequences=plan.sequences)
            _reuse_shards(db, request_id, put)
            _complete(db, request_id)

    def adopt_fingerprint(self, lease: Lease, fingerprint: Fingerprint) -> None:
        """State who scores from now on; shards of another fingerprint are to be made again. Raises LeaseLost."""
        text = canonical_json(fingerprint.to_json()).decode()
        with self._db.write() as db:
            _held(db, lease)
            request_id = lease.request.id
            if db.execute("SELECT fingerprint FROM request WHERE id = ?", (request_id,)).fetchone()[0] == text:
                return
            # a manifest never mixes two fingerprints
            db.execute(
                "UPDATE task SET state = 'pending', reused = 0, positions_done = 0, digest = NULL, bytes = NULL,"
                " quality = NULL WHERE request_id = ? AND number >= 0 AND state = 'done'",
                (request_id,),
            )
            update(db, request_id, fingerprint=text, manifest=None, manifest_shards=0)

    def commit_shard(self, lease: Lease, shard: CommittedShard, tokens_per_s: float, put: PutBlob) -> None:
        """Record a shard and the newest manifest, which is `put` first; raises LeaseLost."""
        descriptor, spec = shard.descriptor, lease.request.spec
        with self._db.write() as db:
            before = _held(db, lease)["positions_done"]
            db.execute(
                "UPDATE task SET state = 'done', reused = 0, positions = ?1, positions_done = ?1, owner = NULL,"
                " error = NULL, digest = ?2, bytes = ?3, quality = ?4 WHERE request_id = ?5 AND number = ?6",
                (
                    descriptor.positions,
                    descriptor.digest,
                    descriptor.bytes,
                    json.dumps(shard.quality),
                    lease.request.id,
                    lease.number,
                ),
            )
            db.execute(
                "INSERT INTO blob VALUES (?, ?, 'shard') ON CONFLICT DO NOTHING", (descriptor.digest, descriptor.bytes)
            )
            _count(db, lease.request.id, descriptor.positions - before, tokens_per_s)
            if spec.generate is None:
                db.execute(
                    "INSERT INTO rate VALUES (?, ?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET tokens_per_s = excluded.tokens_per_s",
                    (spec.teacher, spec.engine, spec.dtype, tokens_per_s),
                )
            if manifest_is_due(db, lease.request.id):
                write_manifest(db, lease.request.id, put)
            _complete(db, lease.request.id)

    def has_work(self) -> bool:
        """Tell whether any task of an active request is open."""
        row = self._db.one(
            "SELECT 1 FROM task JOIN request ON request.id = task.request_id"
            f" WHERE task.state != 'done' AND request.state IN {ACTIVE} LIMIT 1"
        )
        return row is not None

    def overdue(self, owner: str) -> bool:
        """Tell whether an owner holds a lease that has expired."""
        row = self._db.one(
            "SELECT 1 FROM task WHERE state = 'leased' AND owner = ? AND expires_at < ? LIMIT 1", owner, time.time()
        )
        return row is not None


def _reuse_shards(db: sqlite3.Connection, request_id: str, put: PutBlob) -> None:
    """Take the shards that other requests have of this one's open ranges, all of one fingerprint.

    It is that of the newest such request. Should the teacher have changed since, `adopt_fingerprint` finds out before
    anything else is scored, and has them made again.
    """
    found = db.execute(
        "SELECT fingerprint FROM request WHERE fingerprint IS NOT NULL AND id IN (SELECT done.request_id FROM task"
        " JOIN task AS done USING (shard_key) WHERE task.request_id = ?1 AND task.state = 'pending'"
        " AND done.state = 'done' AND done.request_id != ?1) ORDER BY seq DESC LIMIT 1",
        (request_id,),
    ).fetchone()
    request = read_request(db, request_id)
    if found is None or request.fingerprint is not None:
        return
    taken = db.execute(
        "UPDATE task SET state = 'done', reused = 1, positions = done.positions, positions_done = done.positions,"
        " digest = done.digest, bytes = done.bytes, quality = done.quality"
        " FROM task AS done, request WHERE task.request_id = ?1 AND task.state = 'pending'"
        " AND done.shard_key = task.shard_key AND done.state = 'done'"
        " AND request.id = done.request_id AND request.fingerprint = ?2",
        (request_id, found["fingerprint"]),
    ).rowcount
    if taken:
        update(db, request_id, fingerprint=found["fingerprint"])
        write_manifest(db, request_id, put)


def _next_task(db: sqlite3.Connection) -> sqlite3.Row | None:
    for query in NEXT_TASKS:
        task: sqlite3.Row | None = db.execute(query, {"now": time.time()}).fetchone()
        if task is not None:
            return task
    return None


def _take(db: sqlite3.Connection, task: sqlite3.Row, owner: str, seconds: float) -> Lease:
    request_id, number, fence = task["request_id"], task["number"], task["fence"] + 1
    db.execute(
        "UPDATE task SET state = 'leased', positions_done = 0, fence = ?, attempts = attempts + 1, owner = ?,"
        " expires_at = ? WHERE request_id = ? AND number = ?",
        (fence, owner, time.time() + seconds, request_id, number),
    )
    update(db, request_id, state="validating" if number == PLAN else "running")
    part = Range(task["first"], task["sequences"], task["positions"])
    skipped = frozenset(number for number, _ in json.loads(task["skipped"]))
    return Lease(read_request(db, request_id), number, part, fence, bool(task["isolated"]), skipped)


def _find(db: sqlite3.Connection, lease: Lease) -> sqlite3.Row | None:
    row: sqlite3.Row | None = db.execute(
        "SELECT * FROM task WHERE request_id = ? AND number = ? AND fence = ? AND state = 'leased'",
        (lease.request.id, lease.number, lease.fence),
    ).fetchone()
    return row


def _held(db: sqlite3.Connection, lease: Lease) -> sqlite3.Row:
    row = _find(db, lease)
    if row is None:
        raise LeaseLost(f"task {lease.number} of request {lease.request.id} was leased again or given up")
    return row


def _given_back(db: sqlite3.Connection, request_id: str) -> None:
    """Show that a task was given back; a request whose plan it was waits again."""
    if read_request(db, request_id).state == "validating":
        update(db, request_id, activity=None, state="queued")
    else:
        update(db, request_id, activity=None)


def _complete(db: sqlite3.Connection, request_id: str) -> None:
    row = db.execute("SELECT 1 FROM task WHERE request_id = ? AND state != 'done' LIMIT 1", (request_id,)).fetchone()
    if row is None:
        update(db, request_id, state="complete", activity=None)


def _count(
    db: sqlite3.Connection, request_id: str, positions: int, tokens_per_s: float | None, activity: str | None = None
) -> None:
    db.execute("UPDATE request SET tokens_scored = tokens_scored + ? WHERE id = ?", (positions, request_id))
    if tokens_per_s is None:
        update(db, request_id, activity=activity)
    else:
        update(db, request_id, activity=activity, tokens_per_s=tokens_per_s)


def _out_of_attempts(db: sqlite3.Connection, task: sqlite3.Row) -> None:
    """Isolate a range, skip the sequence of an isolated one that failed, or fail the request."""
    request, where = read_request(db, task["request_id"]), (task["request_id"], task["number"])
    skipped = json.loads(task["skipped"])
    if task["reached"] is None or request.spec.generate is not None:
        set_failure(db, request.id, Failure(Code.INTERNAL, _describe_failure(task, skipped)))
    elif not task["isolated"]:
        db.execute("UPDATE task SET isolated = 1, attempts = 0 WHERE request_id = ? AND number = ?", where)
    elif task["reached"] >= 0 and len(skipped) < max(1, int(MAX_SKIPPED_SHARE * task["sequences"])):
        text = json.dumps([*skipped, [task["reached"], task["error"] or "no error was recorded"]])
        db.execute("UPDATE task SET skipped = ?, attempts = 0 WHERE request_id = ? AND number = ?", (text, *where))
    else:
        set_failure(db, request.id, Failure(Code.INTERNAL, _describe_failure(task, skipped)))


def _describe_failure(task: sqlite3.Row, skipped: list[Any]) -> str:
    error = task["error"] or "no error was recorded"
    if task["number"] == PLAN:
        return f"validating the data set failed {task['attempts']} times; the last time: {error}"
    which = f"sequences {task['first']} to {task['first'] + task['sequences'] - 1}"
    if skipped:
        return f"{len(skipped) + 1} of {which} fail, each alone; the last with: {error}"
    return f"scoring {which} failed {task['attempts']} times; the last time: {error}"
