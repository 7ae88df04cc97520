"""Two readers, one text: ours and the one written from SPEC.md alone read the same, or refuse the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import spec_decoder
from format_samples import sequence, shard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_parts import Parts, resealed

from teachercache.format_spec import ScoredSequence, Shard, ShardError

PROFILES = ("bf16", "fp16", "m5")


def plain(item: ScoredSequence) -> dict[str, Any]:
    """A sequence of ours as the second decoder gives it."""
    rows = item.rows
    assert item.loss_mask_L is not None
    found: list[dict[str, Any] | None] = []
    for i in range(len(rows)):
        kept = int((rows.token_ids_PK[i] >= 0).sum())
        if kept == 0:
            found.append(None)
            continue
        row: dict[str, Any] = {
            "token_ids": rows.token_ids_PK[i, :kept].tolist(),
            "logprobs": rows.logprobs_PK[i, :kept].astype(float).tolist(),
        }
        for name in ("log_tail_mass", "logsumexp", "entropy"):
            column = getattr(rows, f"{name}_P")
            if column is not None:
                row[name] = float(column[i])
        if rows.tail_token_ids_PN is not None:
            row["tail_token_ids"] = [x for x in rows.tail_token_ids_PN[i].tolist() if x >= 0]
        found.append(row)
    sequence_: dict[str, Any] = {
        "input_ids": item.input_ids_L.tolist(),
        "loss_mask": item.loss_mask_L.tolist(),
        "rows": found,
    }
    if item.segment_ids_L is not None:
        sequence_["segment_ids"] = item.segment_ids_L.tolist()
    return sequence_


def ours(data: bytes) -> list[dict[str, Any]]:
    """Everything in a shard, verified."""
    shard = Shard(data)
    shard.verify()
    return [plain(item) for item in shard]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=3),
    k=st.integers(1, 9),
    tail_samples=st.integers(0, 6),
    vocab_size=st.sampled_from([12, 300, 70_000]),
    profile=st.sampled_from(PROFILES),
    remap=st.booleans(),
)
def test_both_readers_agree(
    seed: int, lengths: list[int], k: int, tail_samples: int, vocab_size: int, profile: str, remap: bool
) -> None:
    items = [
        sequence(seed + i, n, k=k, tail_samples=tail_samples, vocab_size=vocab_size) for i, n in enumerate(lengths)
    ]
    data = shard_bytes(*items, vocab_size=vocab_size, profile=profile, remap=remap)
    assert spec_decoder.decode(data).sequences == ours(data)


def test_ids_reach_to_the_end_of_the_largest_vocabulary() -> None:
    vocab_size = 2**24 - 1
    item = sequence(4, 6, vocab_size=1000, ragged=False, absent=0, no_tail=0)
    item.rows.token_ids_PK[0, 0] = vocab_size - 1
    item.input_ids_L[0] = vocab_size - 1
    data = shard_bytes(item, vocab_size=vocab_size, remap=False)
    assert spec_decoder.decode(data).sequences == ours(data)
    with_table = Shard(shard_bytes(item, vocab_size=vocab_size)).read(0)
    np.testing.assert_array_equal(with_table.rows.token_ids_PK, item.rows.token_ids_PK)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), reseal=st.booleans())
def test_mutated_bytes_are_refused_by_both_or_read_alike(data: st.DataObject, reseal: bool) -> None:
    """With checksums made right again, damage reaches the rules behind them."""
    seed = data.draw(st.integers(0, 20))
    shard = bytearray(shard_bytes(sequence(seed, 6), sequence(seed + 1, 3), remap=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 3))):
        shard[data.draw(st.integers(0, len(shard) - 1))] = data.draw(st.integers(0, 255))
    mutated = resealed(bytes(shard)) if reseal else bytes(shard)
    try:
        expected = spec_decoder.decode(mutated).sequences
    except spec_decoder.SpecError:
        with pytest.raises(ShardError):
            ours(mutated)
    else:
        assert ours(mutated) == expected


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 4, 5, 255, 256, 4096, 4097, 2**24 - 1, 2**24, 2**53 - 1, 2**53, -(2**53), 10**99),
    *(1.0, float("nan"), "", "1", "bf16", "fp16", "new", "\u00e9", "\ud800", "\x7f", "\x00\x1f", "\U0001f600"),
    *([], {}, [1], ["a"], {"a": 1}, {"\u00e9": 1}, {"": ""}, "sha256:" + "0" * 64, "sha256:" + "A" * 64),
    *(json.loads("[" * depth + "]" * depth) for depth in (60, 61, 62, 63, 64, 65)),
)


def changed(value: Any) -> Iterator[Any]:
    """A value with one thing in it gone, or replaced by each of VALUES."""
    for place in list(value if isinstance(value, dict) else range(len(value))):
        whole = copy.copy(value)
        for whole[place] in VALUES:
            yield whole
        if isinstance(value[place], dict | list):
            for inner in changed(value[place]):
                whole[place] = inner
                yield whole
        del whole[place]
        yield whole


def test_each_change_of_the_metadata_is_refused_for_one_reason_or_read_alike() -> None:
    parts = Parts.of(shard_bytes(sequence(0, 3, vocab_size=300), vocab_size=300))
    later = [*parts.fields["columns"], {"name": "later", "planes": 1, "transform": "new"}]
    frame = parts.frames[0].with_streams([*parts.frames[0].streams, b""])
    read = 0
    for fields in changed(parts.fields | {"columns": later, "extra": {"a": [1]}}):
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        data = replace(parts, metadata=text.encode("utf-8", "surrogatepass"), frames=(frame,)).build()
        found, expected = outcomes(data)
        assert found == expected, fields
        read += isinstance(found, list)
    assert read > 200


def outcomes(data: bytes) -> tuple[Any, Any]:
    """What ours reads and what the second decoder reads, or the names of their errors."""
    found: list[Any] = []
    for read in (ours, lambda data: spec_decoder.decode(data).sequences):
        try:
            found.append(read(data))
        except ShardError as error:
            found.append(type(error).__name__)
        except spec_decoder.SpecError as error:
            found.append(error.name)
    return found[0], found[1]
