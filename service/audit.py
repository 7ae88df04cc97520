"""Scoring a part of a shard again: what was stored is what the teacher says, or the request fails.

The shard is read as a client will read it. Shapes: P positions, K stored entries, D entries scored again, N draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..format_spec import Rows, ScoredSequence, Shard
from ..format_spec.audit import AuditTally
from ..format_spec.shard_set import Report, ShardSet
from .engines import Engine
from .errors import AuditFailed

# of the shards of a request, each so many-th; of a shard, so many tokens, and a sequence in any case
AUDIT_EVERY = 16
AUDIT_POSITIONS = 4096
# of a cache that is audited later
MAX_SHARDS = 16
# scored again with so many times the entries, for a view of the tail
DEEPER, MAX_DEPTH = 4, 256
# mean over rows, in nats: rounding in the store takes 1e-5 (bf16) or 1e-4 (m5), a bf16 teacher's other company 1e-3
KL_TOLERANCE = 0.01
# standard deviations of independent draws; systematic ones vary less
DRAW_TOLERANCE = 6.0


def is_audited(number: int) -> bool:
    """Whether the shard of this number is."""
    return number % AUDIT_EVERY == 0


def audit_shard(shard: Shard, engine: Engine, progress: Callable[[], object] = lambda: None) -> AuditTally:
    """Score some sequences of a shard again, and count how far what is stored is from that.

    `progress` is called after each. Nothing is drawn again: the tail samples are held against the tail.
    """
    # of a sequence that could not be scored there is nothing to compare
    stored, k = [item for item in _sample(shard) if not item.rows.absent_P.all()], shard.metadata.k
    depth = min(DEEPER * k, max(MAX_DEPTH, k), engine.vocab_size)
    tally = AuditTally()
    for index, again in engine.score([item.input_ids_L for item in stored], k=depth, tail_samples=0, seed=0):
        add_rows(tally, stored[index].rows, again)
        progress()
    return tally


def audit_cache(shards: ShardSet, engine: Engine, report: Report | None = None) -> AuditTally:
    """Audit some shards from all over a cache, the first and the last among them."""
    count = min(len(shards.members), MAX_SHARDS)
    tally = AuditTally()
    for done, number in enumerate(np.linspace(0, len(shards.members) - 1, count).astype(int), 1):
        with shards.open(shards.members[number]) as shard:
            tally.merge(audit_shard(shard, engine).to_json())
        if report is not None:
            report(done, count)
    return tally


def check(tally: AuditTally) -> None:
    """Do nothing where the difference is that of rounding.

    Raises:
        AuditFailed: it is more.
    """
    if tally.mean_kl > KL_TOLERANCE or math.isnan(tally.mean_kl):
        raise AuditFailed(
            f"the audit failed: {tally.rows} rows that were scored again differ from what is stored by "
            f"{tally.mean_kl:.4g} nats on average, more than {KL_TOLERANCE}. Rows do not repeat with this engine"
        )
    if abs(tally.draws_z) > DRAW_TOLERANCE:
        raise AuditFailed(
            f"the audit failed: the tail samples of {tally.rows} rows are {tally.draws_z:.1f} standard deviations from "
            f"the tail that was scored again, more than {DRAW_TOLERANCE}"
        )


def add_rows(tally: AuditTally, stored: Rows, again: Rows) -> None:
    """Count the rows of a sequence; a row that is absent in one of both counts as infinitely far."""
    absent_P = stored.absent_P
    if (absent_P != again.absent_P).any():
        tally.add_kl(np.full(1, np.inf))
    for row in np.flatnonzero(~absent_P & ~again.absent_P):
        ids_K, deep_D = stored.token_ids_PK[row], again.token_ids_PK[row]
        ids_K, deep_D = ids_K[ids_K >= 0], deep_D[deep_D >= 0]
        p_K = np.exp(stored.logprobs_PK[row, : len(ids_K)].astype(np.float64))
        q_D = np.exp(again.logprobs_PK[row, : len(deep_D)].astype(np.float64))
        known_K, place_K = _places(ids_K, deep_D)
        tally.add_kl(_kl(p_K, np.where(known_K, q_D[place_K], q_D[-1]))[None])
        if stored.tail_token_ids_PN is not None:
            off_D = np.ones(len(deep_D), bool)
            off_D[place_K[known_K]] = False
            _add_draws(tally, stored.tail_token_ids_PN[row], deep_D[off_D], q_D[off_D], float(p_K.sum()))


def _places(ids_K: npt.NDArray[np.int32], deep_D: npt.NDArray[np.int32]) -> tuple[Any, Any]:
    """Return which ids were found again, and where; 0 for the others."""
    same_KD = ids_K[:, None] == deep_D[None, :]
    return same_KD.any(1), same_KD.argmax(1)


def _kl(p_K: npt.NDArray[np.float64], q_K: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return KL(p || q) over the stored entries and the tail as one outcome; at most that of the whole rows.

    An entry that was not found again has at most the probability of the last one that was.
    """
    rest = (max(1.0 - float(part.sum()), 1e-12) for part in (p_K, q_K))
    p, q = (np.append(part, left) for part, left in zip((p_K, q_K), rest, strict=True))
    kl: npt.NDArray[np.float64] = (p * np.log(p / q)).sum() - p.sum() + q.sum()
    return kl


def _add_draws(
    tally: AuditTally,
    draws_N: npt.NDArray[np.int32],
    ids_D: npt.NDArray[np.int32],
    q_D: npt.NDArray[np.float64],
    support_mass: float,
) -> None:
    """Count the draws among the tail's most probable ids, and how many are expected there."""
    tail = max(1.0 - support_mass, float(q_D.sum()))
    if draws_N[0] < 0 or tail <= 0:
        return
    share = min(float(q_D.sum()) / tail, 1.0)
    tally.add_draws(int(np.isin(draws_N, ids_D).sum()), len(draws_N) * share, len(draws_N) * share * (1 - share))


def _sample(shard: Shard) -> Iterator[ScoredSequence]:
    """Yield sequences from all over a shard: the first, and more of even distance while they are few tokens."""
    mean = max(shard.num_positions // shard.num_sequences, 1)
    count = min(max(AUDIT_POSITIONS // mean, 1), shard.num_sequences)
    taken = 0
    for number in np.linspace(0, shard.num_sequences - 1, count).astype(int):
        item = shard.read(int(number))
        if taken and taken + len(item) > AUDIT_POSITIONS:
            return
        taken += len(item)
        yield item


def to_json(tally: AuditTally) -> dict[str, Any]:
    """Return what is said of an audit."""
    return {
        "rows": tally.rows,
        "mean_kl": tally.mean_kl,
        "max_kl": tally.max_kl,
        "draws_z": tally.draws_z,
        "kl_tolerance": KL_TOLERANCE,
        "draws_tolerance": DRAW_TOLERANCE,
    }
