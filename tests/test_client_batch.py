"""Batches hold the stored rows, and padding that cannot be mistaken for them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from format_samples import fingerprint, sequence, shard_bytes
from tiny_cache import write_cache

from teachercache.client import TopkBatch, collate
from teachercache.client.directory import CacheDirectory
from teachercache.client.reader import SequenceReader
from teachercache.client.source import DirectorySource
from teachercache.format_spec import PAD_ID, InvalidRows, ScoredSequence, Shard, ShardMetadata, ShardWriter
from teachercache.format_spec.cache_folder import read_manifest, shard_path


def check_row(batch: TopkBatch, b: int, item: ScoredSequence) -> None:
    """Compare sequence b of a batch with what was stored, and its padding with what is promised."""
    L, rows = len(item), item.rows
    present = ~rows.absent_P
    assert (batch.input_ids_BT[b, :L] == item.input_ids_L).all()
    assert not batch.input_ids_BT[b, L:].any()
    assert batch.attention_mask_BT[b].tolist() == [i < L for i in range(batch.input_ids_BT.shape[1])]
    assert (batch.counted_BP[b, : L - 1] == item.counted_P).all()
    assert not batch.counted_BP[b, L - 1 :].any()
    for target, column, pad in (
        (batch.token_ids_BPK, rows.token_ids_PK, PAD_ID),
        (batch.logprobs_BPK, rows.logprobs_PK, -np.inf),
        (batch.log_tail_mass_BP, rows.log_tail_mass_P, -np.inf),
        (batch.logsumexp_BP, rows.logsumexp_P, 0.0),
        (batch.entropy_BP, rows.entropy_P, 0.0),
        (batch.tail_token_ids_BPN, rows.tail_token_ids_PN, PAD_ID),
    ):
        assert (target is None) == (column is None)
        if target is not None and column is not None:
            assert (target[b, : L - 1][present] == column[present]).all()
            assert (target[b, : L - 1][~present] == pad).all()
            assert (target[b, L - 1 :] == pad).all()


@pytest.mark.parametrize("tail_samples", [0, 3])
def test_batch_equals_rows(tail_samples: int) -> None:
    items = [sequence(i, length, tail_samples=tail_samples) for i, length in enumerate((2, 30, 17))]
    batch = collate(items, cursor=12, epoch=1)
    assert (len(batch), batch.input_ids_BT.shape, batch.token_ids_BPK.shape) == (3, (3, 30), (3, 29, 5))
    assert (batch.cursor, batch.epoch) == (12, 1)
    for b, item in enumerate(items):
        check_row(batch, b, item)
    for column in (batch.log_tail_mass_BP, batch.entropy_BP, batch.logsumexp_BP):
        assert column is not None
        assert not np.isnan(column).any()


def test_types_are_those_promised() -> None:
    batch = collate([sequence()])
    kinds = {"input_ids_BT": "int64", "attention_mask_BT": "bool", "counted_BP": "bool", "token_ids_BPK": "int32"}
    kinds |= {"logprobs_BPK": "float32", "log_tail_mass_BP": "float32", "tail_token_ids_BPN": "int32"}
    assert {name: str(getattr(batch, name).dtype) for name in kinds} == kinds


def test_filled_up_sequences_count_for_nothing() -> None:
    item = sequence(1, 9)
    batch = collate([item], batch_size=3)
    check_row(batch, 0, item)
    assert len(batch) == 3
    assert not batch.counted_BP[1:].any()
    assert not batch.input_ids_BT[1:].any()
    # Attention over nothing is not a number, and that would reach the weights.
    assert batch.attention_mask_BT[1:].sum(axis=1).tolist() == [1, 1]


def test_batch_of_nothing_but_filling() -> None:
    item = sequence(1, 9)
    batch = collate([], batch_size=2, like=item)
    assert batch.input_ids_BT.shape == (2, 2)
    assert batch.token_ids_BPK.shape == (2, 1, 5)
    assert batch.tail_token_ids_BPN is not None
    assert not batch.counted_BP.any()


def test_segments_are_kept_apart_from_padding() -> None:
    segments = np.array([0, 0, 1, 1, 1], np.int32)
    items = [replace(sequence(0, 5), segment_ids_L=segments), replace(sequence(1, 3), segment_ids_L=segments[:3])]
    batch = collate(items)
    assert batch.segment_ids_BT is not None
    assert batch.segment_ids_BT.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, -1, -1]]


def test_mixed_columns_are_refused() -> None:
    plain = sequence(0, 5)
    packed = replace(plain, segment_ids_L=np.zeros(5, np.int32))
    for items in ([plain, packed], [packed, plain]):
        with pytest.raises(InvalidRows, match="segment_ids"):
            collate(items)
    with pytest.raises(InvalidRows, match=r"\(3, 4\) in a batch of \(5, 4\)"):
        collate([plain, sequence(0, 5, k=3)])
    with pytest.raises(InvalidRows, match="at least one"):
        collate([])


def test_a_batch_read_from_shards_is_that_of_its_sequences(tmp_path: Path) -> None:
    items = [sequence(i, 4 + 3 * i, absent=0.3, no_tail=0.3) for i in range(6)]
    reader = SequenceReader(
        DirectorySource(CacheDirectory(write_cache(tmp_path / "cache", items, maker=fingerprint())))
    )
    for numbers in ([5, 0, 3], [2], []):
        read = reader.read_batch(numbers, like=4, batch_size=4, cursor=7, epoch=2)
        stored = [reader.read(number) for number in numbers]
        made = collate(stored, batch_size=4, like=reader.read(4), cursor=7, epoch=2)
        for field in fields(read):
            np.testing.assert_array_equal(getattr(read, field.name), getattr(made, field.name), strict=True)
        for b, item in enumerate(stored):
            check_row(read, b, item)
    reader.close()


def test_shards_with_other_columns_do_not_share_a_batch(tmp_path: Path) -> None:
    items = [sequence(i, 6) for i in range(2)]
    folder = write_cache(tmp_path / "cache", items, maker=fingerprint(), shards=2)
    manifest = read_manifest(folder)
    columns = tuple(column for column in Shard(shard_bytes(items[1])).metadata.columns if column.name != "logsumexp")
    with shard_path(folder, manifest.shards[1].digest).open("wb") as file:
        writer = ShardWriter(file, ShardMetadata(fingerprint(), 5, 4, columns=columns))
        writer.add(items[1])
        writer.finish()
    reader = SequenceReader(DirectorySource(CacheDirectory(folder)))
    assert reader.read_batch([1], like=1, batch_size=1).logsumexp_BP is None
    for numbers in ([0, 1], [1, 0]):
        with pytest.raises(InvalidRows, match="some sequences of the batch have logsumexp, others have not"):
            reader.read_batch(numbers, like=numbers[0], batch_size=2)
    reader.close()
