"""What is asked for and how far it is: the records, and the interface to where they are kept.

A request is worked on as tasks. Task `PLAN` validates the data set and cuts it into ranges; task n is the n-th
range. Whoever works on a task holds a lease with a fence: once the task is leased again, the old fence is refused.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..format_spec import (
    CacheRequest,
    Code,
    Fingerprint,
    Manifest,
    QualityTally,
    ShardDescriptor,
    canonical_json,
    digest_bytes,
)
from .store import Blob
from .tokens import ANYBODY, Token

PLAN = -1
MAX_ATTEMPTS = 3
# of a range's sequences, one at the least: more that fail are no fault of theirs
MAX_SKIPPED_SHARE = 0.01
ACTIVE = ("queued", "validating", "running")
PutBlob = Callable[[bytes], Blob]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed."""

    code: Code
    detail: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sequence that the teacher could not score, by its number in the data set; its rows are absent."""

    sequence: int
    error: str


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request and its progress; `tokens` is the digest of the normalised token file, once it is planned.

    `positions_reused` are those of shards that another request had made; `activity` is what is done for it, where
    that is not scoring.
    """

    seq: int
    id: str
    spec: CacheRequest
    teacher_name: str
    state: str
    version: int
    created_at: str
    updated_at: str
    tokens: str | None
    sequences: int | None
    positions: int | None
    positions_done: int
    shards: int | None
    shards_done: int
    positions_reused: int
    fingerprint: Fingerprint | None
    manifest: str | None
    tokens_scored: int
    tokens_per_s: float | None
    activity: str | None
    skipped: tuple[Skipped, ...]
    owners: tuple[str, ...]
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Of all requests: how many are in which state, their tokens, and the bytes of blobs by kind."""

    requests: dict[str, int]
    tokens_scored: int
    tokens_reused: int
    bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive sequences of a data set that become one shard; `content` is a digest of their tokens and masks."""

    first: int
    sequences: int
    positions: int
    content: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A validated data set: its normalised token file, row group n of which holds range n."""

    tokens: Blob
    ranges: tuple[Range, ...]

    @property
    def sequences(self) -> int:
        """Sequences in all ranges."""
        return sum(part.sequences for part in self.ranges)

    @property
    def positions(self) -> int:
        """Tokens in all ranges."""
        return sum(part.positions for part in self.ranges)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a task, while nobody else has leased it since.

    A range that has failed too often is `isolated`: its sequences are scored one by one, so that the one that is to
    blame is found; it becomes one of the `skipped`, numbers inside the range, and the others go on.
    """

    request: RequestRow
    number: int
    range: Range
    fence: int
    isolated: bool = False
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CommittedShard:
    """A shard of a request, with the sums of its quality."""

    descriptor: ShardDescriptor
    quality: dict[str, Any]


def owner_of(pid: int) -> str:
    """Return the name under which the process with this id holds leases."""
    return f"{socket.gethostname()}:{pid}"


def shard_key(spec: CacheRequest, part: Range) -> str:
    """Return what two requests share whose shards of a range hold the same: all that is asked for, and the sequences.

    Which data set the range is from, and where it stands there, changes no number; but for completions, which are drawn
    by the number of their prompt.
    """
    asked = {name: value for name, value in spec.to_json().items() if name not in ("data", "shard_positions")}
    place = {} if spec.generate is None else {"first": part.first}
    return digest_bytes(canonical_json({"asked": asked, "content": part.content, **place}))


def manifest_of(request: RequestRow, shards: Sequence[CommittedShard]) -> Manifest:
    """Return the manifest of the shards committed so far, at least one."""
    assert request.fingerprint is not None and request.sequences is not None
    tally = QualityTally()
    for shard in shards:
        tally.merge(shard.quality)
    return Manifest(
        request=request.spec,
        fingerprint=request.fingerprint,
        teacher_name=request.teacher_name,
        sequences=request.sequences,
        complete=sum(shard.descriptor.sequences for shard in shards) == request.sequences,
        shards=tuple(shard.descriptor for shard in shards),
        quality=tally.quality(),
    )


class Meta(Protocol):
    """The records of one data directory; every method is one transaction and may be called from any thread."""

    def submit(self, spec: CacheRequest, teacher_name: str, owner: str = ANYBODY) -> tuple[RequestRow, bool]:
        """Return the request, of which `owner` is now one, and whether it is new.

        One that failed over damaged bytes, or was cancelled, is queued again.
        """

    def request(self, request_id: str) -> RequestRow:
        """Return a request; raises NotFound."""

    def requests(self, limit: int, before: int | None = None) -> list[RequestRow]:
        """Return requests, newest first, those with `seq` below `before`."""

    def retry(self, request_id: str) -> RequestRow:
        """Queue a failed request again; raises NotFound, JobFailed when it has not failed."""

    def cancel(self, request_id: str, owner: str, *, everybody: bool = False) -> RequestRow:
        """Take back an owner's interest, or everybody's; work on what nobody wants ends, and its shards stay.

        Raises:
            NotFound: there is no such request.
            Forbidden: it is not one of the owner's.
        """

    def lease(self, owner: str, seconds: float) -> Lease | None:
        """Lease the next task: plans before ranges, older requests first.

        A range out of attempts is isolated; a sequence of it out of attempts is skipped. A plan, or too many sequences,
        fails the request.
        """

    def renew(
        self,
        lease: Lease,
        seconds: float,
        positions_done: int = 0,
        tokens_per_s: float | None = None,
        activity: str | None = None,
    ) -> None:
        """Extend a lease and record progress; raises LeaseLost."""

    def reach(self, lease: Lease, number: int) -> None:
        """Record that a range is being scored (-1), or which sequence of an isolated one; each has its own attempts."""

    def release(self, lease: Lease, error: str | None = None) -> None:
        """Give a task back; with an error the attempt counts. Nothing happens when the lease is lost."""

    def fail(self, lease: Lease, failure: Failure) -> None:
        """Fail a lease's request, whose leases are all lost. Nothing happens when this one was lost before."""

    def release_owner(self, owner: str | None, error: str | None) -> int:
        """Take back all leases of a dead owner, or of all owners, as `release` does; return how many."""

    def commit_plan(self, lease: Lease, plan: Plan, put: PutBlob) -> None:
        """Record a plan and its ranges; those that another request has shards of are done. Raises LeaseLost."""

    def adopt_fingerprint(self, lease: Lease, fingerprint: Fingerprint) -> None:
        """State who scores from now on; shards of another fingerprint are to be made again. Raises LeaseLost."""

    def commit_shard(self, lease: Lease, shard: CommittedShard, tokens_per_s: float, put: PutBlob) -> None:
        """Record a shard and, where it is due, the newest manifest, which is `put` first; raises LeaseLost."""

    def damaged(self, digest: str, put: PutBlob) -> None:
        """Forget a blob that is lost, and mark whatever was made of it to be made again."""

    def has_work(self) -> bool:
        """Tell whether any task of an active request is open."""

    def overdue(self, owner: str) -> bool:
        """Tell whether an owner holds a lease that has expired."""

    def rate(self, teacher: str, engine: str, dtype: str) -> float | None:
        """Return the tokens per second of the last shard that this teacher scored."""

    def add_token(self, token: Token, digest: str) -> None:
        """Record a token and the hash of it."""

    def tokens(self) -> list[Token]:
        """Return all tokens, the oldest first."""

    def find_token(self, digest: str) -> Token | None:
        """Return the token with this hash."""

    def has_tokens(self) -> bool:
        """Whether there is one, valid or not."""

    def revoke_token(self, token_id: str) -> Token:
        """Make a token open nothing any more; raises NotFound."""

    def totals(self) -> Totals:
        """Return sums over all requests and blobs."""

    def add_blob(self, blob: Blob, kind: str) -> None:
        """Record a blob that is durable."""

    def blobs(self) -> dict[str, int]:
        """Return the size in bytes of every blob that is recorded."""

    def blob_kind(self, digest: str) -> str | None:
        """Return "upload", "tokens", "shard" or "manifest", None for an unknown digest."""

    def file_digest(self, path: Path) -> str:
        """Return the digest of a file, from memory while its size and modification time stay."""

    def probe(self) -> None:
        """Write and sync; raises Unavailable."""
