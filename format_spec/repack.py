"""Shards anew: with fewer digits, with a smaller support, or by a newer writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from .cache_folder import CacheWriter, write_shard
from .errors import InvalidRows, LimitExceeded
from .metadata import ShardMetadata
from .rows import Rows, ScoredSequence
from .shard_set import Report, ShardSet

# the finest first
FINENESS = ("fp16", "bf16", "m5")


def repack(
    shards: ShardSet, target: Path, *, profile: str | None = None, k: int | None = None, report: Report | None = None
) -> None:
    """Write a shard to the file `target`, a cache to the folder `target`, shard for shard.

    A smaller k moves what it cuts off into the tail mass. A manifest's request gets the new profile and k, so the
    cache is another one; its values were rounded twice, and may differ in the last digit from those of a teacher
    asked for that profile.

    Raises:
        InvalidRows: the support has tail samples and would shrink (what was cut off could never have been drawn), or
            the profile is finer than the stored one (its digits would be made up).
        LimitExceeded: k is above the stored one.
        TargetError: the target cannot be written, or is a cache already.
    """
    new = _new_metadata(shards.metadata, profile, k)
    if shards.manifest is None:
        write_shard(target, new, _shrunk(shards.sequences(report), new.k))
        return
    writer, done = CacheWriter(target), 0
    for member in shards.members:
        with shards.open(member) as shard:
            metadata = _new_metadata(shard.metadata, profile, k)
            writer.add_shard(metadata, _shrunk(shard, new.k), member.descriptor.first if member.descriptor else None)
            done += shard.num_sequences
        if report is not None:
            report(done, shards.num_sequences)
    manifest = shards.manifest
    request = replace(manifest.request, profile=new.profile, k=new.k)
    writer.finish(request, manifest.fingerprint, manifest.teacher_name, manifest.sequences)


def shrink(rows: Rows, k: int) -> Rows:
    """Return plain top-k rows with their k most probable entries; the rest joins the tail mass.

    Raises:
        InvalidRows: the rows have tail samples.
    """
    if k == rows.k:
        return rows
    if rows.tail_samples:
        raise InvalidRows(_must_not_shrink(rows.k, k))
    old_P = np.where(rows.absent_P, -np.inf, rows.log_tail_mass_P)
    outside = np.concatenate([old_P[:, None], rows.logprobs_PK[:, k:]], axis=1, dtype=np.float64)
    tail_P = np.logaddexp.reduce(outside, axis=1)
    return replace(
        rows,
        token_ids_PK=rows.token_ids_PK[:, :k],
        logprobs_PK=rows.logprobs_PK[:, :k],
        log_tail_mass_P=np.minimum(tail_P, 0.0).astype(np.float32),
    )


def _must_not_shrink(old_k: int, new_k: int) -> str:
    return (
        f"a support with tail samples must not shrink from k {old_k} to {new_k}, for what is cut off could never have"
        " been drawn (SPEC 4.7); ask the teacher again, with a smaller k or a min_prob"
    )


def _shrunk(sequences: Iterable[ScoredSequence], k: int) -> Iterator[ScoredSequence]:
    return (replace(sequence, rows=shrink(sequence.rows, k)) for sequence in sequences)


def _new_metadata(old: ShardMetadata, profile: str | None, k: int | None) -> ShardMetadata:
    profile, k = profile or old.profile, k or old.k
    if k > old.k:
        raise LimitExceeded(f"k {k} is above {old.k}, what the rows were stored with")
    if k < old.k and old.tail_samples:
        raise InvalidRows(_must_not_shrink(old.k, k))
    new = ShardMetadata(old.fingerprint, k, old.tail_samples, profile, old.columns)
    if FINENESS.index(profile) < FINENESS.index(old.profile):
        raise InvalidRows(f"profile {profile} is finer than {old.profile}: the digits are gone")
    if unknown := [column.name for column in old.columns if not column.is_known]:
        raise InvalidRows(f"columns {unknown} are of a newer version and would be lost")
    return new
