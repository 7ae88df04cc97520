"""The tables of the database."""

from __future__ import annotations

VERSION = 4

SCHEMA = """
CREATE TABLE request (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    spec TEXT NOT NULL,
    teacher_name TEXT NOT NULL,
    state TEXT NOT NULL
        CHECK (state IN ('queued', 'validating', 'running', 'complete', 'failed', 'cancelled')),
    version INTEGER NOT NULL DEFAULT 1,
    created_at TEXT NOT NULL,
    updated_at TEXT NOT NULL,
    tokens TEXT,
    sequences INTEGER,
    fingerprint TEXT,
    manifest TEXT,
    manifest_shards INTEGER NOT NULL DEFAULT 0,
    tokens_scored INTEGER NOT NULL DEFAULT 0,
    tokens_per_s REAL,
    activity TEXT,
    error_code TEXT,
    error_detail TEXT
) STRICT;

CREATE TABLE task (
    request_id TEXT NOT NULL REFERENCES request (id),
    number INTEGER NOT NULL,
    first INTEGER NOT NULL,
    sequences INTEGER NOT NULL,
    positions INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'leased', 'done')),
    positions_done INTEGER NOT NULL DEFAULT 0,
    fence INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    expires_at REAL,
    error TEXT,
    digest TEXT,
    bytes INTEGER,
    quality TEXT,
    isolated INTEGER NOT NULL DEFAULT 0,
    reached INTEGER,
    skipped TEXT NOT NULL DEFAULT '[]',
    shard_key TEXT,
    reused INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (request_id, number)
) STRICT, WITHOUT ROWID;

CREATE INDEX active_request ON request (seq) WHERE state IN ('queued', 'validating', 'running');
CREATE INDEX next_task ON task (request_id, number) WHERE state != 'done';
CREATE INDEX open_task ON task (state) WHERE state != 'done';
CREATE INDEX task_shard_key ON task (shard_key) WHERE shard_key IS NOT NULL;
CREATE INDEX task_digest ON task (digest) WHERE digest IS NOT NULL;

CREATE TABLE blob (
    digest TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('upload', 'tokens', 'shard', 'manifest'))
) STRICT, WITHOUT ROWID;

CREATE TABLE token (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    scopes TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    created_at TEXT NOT NULL,
    expires_at TEXT,
    revoked INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE TABLE interest (
    request_id TEXT NOT NULL REFERENCES request (id),
    owner TEXT NOT NULL,
    since TEXT NOT NULL,
    PRIMARY KEY (request_id, owner)
) STRICT, WITHOUT ROWID;

CREATE TABLE rate (
    teacher TEXT NOT NULL,
    engine TEXT NOT NULL,
    dtype TEXT NOT NULL,
    tokens_per_s REAL NOT NULL,
    PRIMARY KEY (teacher, engine, dtype)
) STRICT, WITHOUT ROWID;

CREATE TABLE file_digest (
    path TEXT PRIMARY KEY,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    digest TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE probe (id INTEGER PRIMARY KEY CHECK (id = 1), written_at TEXT NOT NULL) STRICT;
"""

# a request with its progress, as `parse_request` reads it: one pass over its tasks
SELECT_REQUEST = """
SELECT request.*, (
    SELECT json_array(
        count(*) FILTER (WHERE number >= 0),
        count(*) FILTER (WHERE number >= 0 AND task.state = 'done'),
        sum(positions) FILTER (WHERE number >= 0),
        sum(positions_done),
        sum(positions) FILTER (WHERE reused),
        json_group_array(json_array(first, json(skipped))) FILTER (WHERE skipped != '[]')
    ) FROM task WHERE request_id = request.id
) AS progress, (SELECT json_group_array(owner) FROM interest WHERE request_id = request.id) AS owners FROM request
"""

_OPEN = """
SELECT task.* FROM request JOIN task INDEXED BY next_task ON task.request_id = request.id
WHERE request.state IN ('queued', 'validating', 'running') AND task.state != 'done'
    AND (task.state = 'pending' OR task.expires_at < :now)
"""
# plans before ranges: a bad data set is reported while a long job runs; ranges wait for their plan
NEXT_TASKS = (
    _OPEN + "AND task.number < 0 ORDER BY request.seq LIMIT 1",
    _OPEN + "AND task.number >= 0 AND request.tokens IS NOT NULL ORDER BY request.seq, task.number LIMIT 1",
)
