"""Columns of a sequence: only those asked for are decoded, into arrays of the caller's and nowhere else."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from format_samples import fingerprint, sequence, shard_bytes
from shard_parts import Parts

from teachercache.format_spec import (
    PAD_ID,
    ColumnError,
    CorruptFrame,
    LimitExceeded,
    ScoredSequence,
    Shard,
    ShardMetadata,
    ShardWriter,
)
from teachercache.format_spec.constants import PAD_CODE
from teachercache.format_spec.metadata import COLUMNS, Column

K, N = 5, 4
FLOATS = ("log_tail_mass", "logsumexp", "entropy")
# what arrays hold after an error
BLANK = dict.fromkeys(("input_ids", "segment_ids", "token_ids", "tail_token_ids"), PAD_ID)
BLANK |= {"loss_mask": False, "logprobs": -np.inf} | dict.fromkeys(FLOATS, np.nan)
JUNK = b"no stream"


def shard_of(*items: ScoredSequence, vocab_size: int = 1000, remap: bool = True) -> bytes:
    """A shard with every column there is."""
    file = io.BytesIO()
    columns = tuple(Column(name, planes) for name, (planes, _, _) in COLUMNS.items())
    writer = ShardWriter(file, ShardMetadata(fingerprint(vocab_size), K, N, columns=columns), remap=remap)
    for item in items:
        writer.add(replace(item, segment_ids_L=np.arange(len(item), dtype=np.int32)))
    writer.finish()
    return file.getvalue()


def ragged(length: int = 20) -> ScoredSequence:
    """Rows of every kind: short, absent, without a tail."""
    return sequence(4, length, absent=0.3, no_tail=0.3)


DATA = shard_of(sequence(3, 8), ragged())


def marked(shard: Shard, names: Iterable[str] = COLUMNS, margin: int = 0) -> dict[str, np.ndarray]:
    """Arrays for sequence 1, larger by a margin all round, every byte of which no reader writes."""
    found = {}
    for name, column in shard.read_columns(1, names).items():
        shape = [size + 2 * margin for size in column.shape]
        found[name] = np.full((*shape, column.itemsize), 0x55, np.uint8).view(column.dtype)[..., 0]
    return found


@pytest.mark.parametrize(("vocab_size", "remap"), [(1000, True), (1000, False), (2**24 - 1, False)])
def test_a_column_is_the_same_whatever_else_is_read(vocab_size: int, remap: bool) -> None:
    item = ragged()
    ids = item.rows.token_ids_PK
    # in the largest vocabulary the highest byte of an id is that of padding
    ids[:, 0] += np.where(ids[:, 0] == PAD_ID, 0, (vocab_size - 1000) & 0xFF0000).astype(np.int32)
    shard = Shard(shard_of(sequence(3, 8), item, vocab_size=vocab_size, remap=remap))
    everything = shard.read_columns(1)
    assert set(everything) == set(COLUMNS)
    np.testing.assert_array_equal(everything["token_ids"], ids)
    assert (np.isnan(everything["entropy"]) == item.rows.absent_P).all()
    for names in [(), *((name,) for name in COLUMNS), *combinations(COLUMNS, 2)]:
        found = shard.read_columns(1, names)
        assert set(found) == set(names)
        for name, column in found.items():
            np.testing.assert_array_equal(column, everything[name], strict=True)


@pytest.mark.parametrize("left_out", COLUMNS)
def test_a_column_left_out_is_not_decompressed(left_out: str) -> None:
    sound, parts = Shard(DATA), Parts.of(DATA)
    # where it is read nowhere, what stands in for absent rows is the highest plane of the ids
    for plane in range(COLUMNS[left_out][0] - (left_out == "token_ids")):
        parts = parts.with_stream(left_out, JUNK, 1, plane)
    shard, others = Shard(parts.build()), [name for name in COLUMNS if name != left_out]
    for name, column in shard.read_columns(1, others).items():
        np.testing.assert_array_equal(column, sound.read_columns(1)[name])
    with pytest.raises(CorruptFrame, match="not one zstd frame"):
        shard.read_columns(1, [left_out])
    with pytest.raises(CorruptFrame, match="not one zstd frame"):
        shard.read(1)


def test_only_floats_need_to_know_the_absent_rows() -> None:
    shard = Shard(Parts.of(DATA).with_stream("token_ids", JUNK, 1, plane=2).build())
    for name in COLUMNS:
        if name in (*FLOATS, "token_ids"):
            with pytest.raises(CorruptFrame, match="not one zstd frame"):
                shard.read_columns(1, [name])
        else:
            shard.read_columns(1, [name])


def test_a_frame_is_checked_whole_whatever_is_read() -> None:
    damaged = bytearray(DATA)
    damaged[int(Shard(DATA).index["offset"][2 - 1]) + 100] ^= 1
    with pytest.raises(CorruptFrame, match="checksum"):
        Shard(bytes(damaged)).read_columns(1, ["loss_mask"])


def test_other_names_are_refused() -> None:
    plain = Shard(shard_bytes(sequence(1, 9), sequence(2, 9)))
    for shard, name in ((plain, "segment_ids"), (Shard(DATA), "logits"), (Shard(DATA), "token_ids_PK")):
        with pytest.raises(ColumnError, match=f"no column '{name}' to read; it has input_ids, loss_mask, "):
            shard.read_columns(1, ["input_ids", name])
        arrays = marked(shard, ["input_ids"])
        with pytest.raises(ColumnError, match=name):
            shard.read_into(1, arrays | {name: np.zeros(9, np.int32)})
        assert (arrays["input_ids"] == 0x55555555).all()
    parts = Parts.of(DATA)
    parts = parts.with_fields(columns=[*parts.fields["columns"], {"name": "later", "planes": 1, "transform": "new"}])
    newer = Shard(parts.with_frame(parts.frames[1].with_streams([*parts.frames[1].streams, b""]), 1).build())
    assert set(newer.read_columns(1)) == set(COLUMNS)
    with pytest.raises(ColumnError, match="no column 'later' to read"):
        newer.read_columns(1, ["later"])
    for number in (-1, 2):
        with pytest.raises(IndexError, match=f"sequence {number} of a shard of 2"):
            plain.read_columns(number, ["input_ids"])


@pytest.mark.parametrize("order", ["C", "F"])
def test_nothing_is_written_outside_the_arrays(order: str) -> None:
    shard = Shard(DATA)
    outer = {name: np.array(array, order=order) for name, array in marked(shard, margin=2).items()}
    poison = {name: array.copy() for name, array in outer.items()}
    inner = {name: array[(slice(2, -2),) * array.ndim] for name, array in outer.items()}
    shard.read_into(1, inner)
    for name, column in shard.read_columns(1).items():
        np.testing.assert_array_equal(inner[name], column, strict=True)
        poison[name][(slice(2, -2),) * column.ndim] = column
        assert outer[name].tobytes() == poison[name].tobytes()


@pytest.mark.parametrize("name", COLUMNS)
def test_an_array_that_does_not_fit_is_refused_before_anything_is_written(name: str) -> None:
    shard = Shard(DATA)
    arrays = marked(shard)
    right, before = arrays[name], {key: array.copy() for key, array in arrays.items()}
    swapped = right.dtype.newbyteorder() if right.itemsize > 1 else np.dtype(np.uint8)
    for dtype in (np.float64, np.int64, np.uint8, swapped):
        with pytest.raises(ColumnError, match=f"column {name} needs an array of {right.dtype} "):
            shard.read_into(1, arrays | {name: np.zeros(right.shape, dtype)})
    for shape in (right.shape[1:], (*right.shape, 1), (right.shape[0] + 1, *right.shape[1:]), (*right.shape[::-1], 0)):
        with pytest.raises(ColumnError, match=f"column {name} needs"):
            shard.read_into(1, arrays | {name: np.zeros(shape, right.dtype)})
    right.flags.writeable = False
    with pytest.raises(ColumnError, match=f"the array given for column {name} is read-only"):
        shard.read_into(1, arrays)
    for key, array in arrays.items():
        assert array.tobytes() == before[key].tobytes()


@pytest.mark.parametrize("damaged", ["checksum", "key", *COLUMNS])
def test_after_an_error_nothing_is_half_believed(damaged: str) -> None:
    parts = Parts.of(DATA)
    if damaged == "checksum":
        parts = parts.with_entry(1, checksum=0)
    elif damaged == "key":
        parts = parts.with_entry(1, key=bytes(8))
    else:
        parts = parts.with_stream(damaged, JUNK, 1)
    shard, arrays = Shard(parts.build()), marked(Shard(DATA))
    with pytest.raises(CorruptFrame):
        shard.read_into(1, arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, np.full_like(array, BLANK[name]))


def test_a_column_above_the_limit_is_refused_before_memory_is_taken() -> None:
    item = sequence(1, 9)
    parts = Parts.of(shard_bytes(item)).with_fields(k=4096).with_entry(positions=1 << 22)
    shard = Shard(parts.build())
    with pytest.raises(LimitExceeded, match="a plane of 17179865088 bytes"):
        shard.read_columns(0, ["token_ids"])
    with pytest.raises(CorruptFrame, match="counts"):
        shard.read_columns(0, ["input_ids"])


def test_rules_that_bind_columns_are_checked_where_all_are_read() -> None:
    parts = Parts.of(shard_of(sequence(3, 8, ragged=False, absent=0, no_tail=0)))
    padded = Shard(parts.with_integer("token_ids", 2 * K + K - 1, PAD_CODE).build())
    with pytest.raises(CorruptFrame, match="padded in different places"):
        padded.read(0)
    assert padded.read_columns(0, ["token_ids"])["token_ids"][2, -1] == PAD_ID
    assert np.isfinite(padded.read_columns(0, ["logprobs"])["logprobs"]).all()
    codes = parts.integers("tail_token_ids")
    codes[:N] = [PAD_CODE] + [0] * (N - 1)
    undrawn = Shard(parts.with_integers("tail_token_ids", codes).build())
    with pytest.raises(CorruptFrame, match="one with a tail has none"):
        undrawn.read(0)
    assert (undrawn.read_columns(0, ["tail_token_ids"])["tail_token_ids"][0] == PAD_ID).all()


def test_a_segment_is_not_the_padding() -> None:
    with pytest.raises(CorruptFrame, match="segment"):
        Shard(Parts.of(DATA).with_integer("segment_ids", 3, PAD_CODE).build()).read(0)


@pytest.mark.parametrize("tail_samples", [256, 257, 4096])
def test_sums_of_tail_samples_do_not_wrap(tail_samples: int) -> None:
    item = sequence(2, 4, tail_samples=tail_samples, absent=0, no_tail=0)
    parts = Parts.of(shard_bytes(item, remap=False))
    drawn = Shard(parts.build()).read(0).rows.tail_token_ids_PN
    np.testing.assert_array_equal(drawn, item.rows.tail_token_ids_PN)
    # 257 of these add up to 2^32 + 5
    wrapping = [PAD_CODE - 1, *[PAD_CODE] * 255, 262]
    deltas = parts.integers("tail_token_ids")
    deltas[:tail_samples] = (wrapping + [0] * tail_samples)[:tail_samples]
    with pytest.raises(CorruptFrame, match="outside the vocabulary"):
        Shard(parts.with_integers("tail_token_ids", deltas).build()).read(0)
