"""Shards: what is written is what is read, and nothing damaged is read at all."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from format_samples import fingerprint, sequence, shard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from teachercache.format_spec import (
    CorruptFooter,
    CorruptFrame,
    CorruptIndex,
    CorruptMetadata,
    CorruptTable,
    InvalidRows,
    LimitExceeded,
    NotAShard,
    ScoredSequence,
    Shard,
    ShardError,
    ShardMetadata,
    ShardWriter,
    TruncatedShard,
    UnsupportedFeature,
    UnsupportedVersion,
    canonical_json,
)
from teachercache.format_spec.constants import PAD_CODE
from teachercache.format_spec.footer import HEADER_SIZE, INDEX_DTYPE, TRAILER_SIZE, Footer
from teachercache.format_spec.metadata import Column
from teachercache.format_spec.profiles import PROFILES
from teachercache.format_spec.remap import RemapTable

ERRORS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "m5": 2.0**-6}


def assert_same(stored: ScoredSequence, given_: ScoredSequence, profile: str = "bf16") -> None:
    rows, truth = stored.rows, given_.rows
    np.testing.assert_array_equal(stored.input_ids_L, given_.input_ids_L)
    mask = np.ones(len(given_), bool) if given_.loss_mask_L is None else given_.loss_mask_L
    np.testing.assert_array_equal(stored.loss_mask_L, mask)
    np.testing.assert_array_equal(rows.token_ids_PK, truth.token_ids_PK)
    finite = np.isfinite(truth.logprobs_PK)
    np.testing.assert_array_equal(np.isfinite(rows.logprobs_PK), finite)
    np.testing.assert_allclose(rows.logprobs_PK[finite], truth.logprobs_PK[finite], rtol=ERRORS[profile], atol=2.0**-25)
    present = ~truth.absent_P
    for name in ("log_tail_mass_P", "logsumexp_P", "entropy_P"):
        got, want = getattr(rows, name), getattr(truth, name)
        # the writer rounds entropy (SPEC 4.6) and keeps the others bit by bit
        tolerance = 2.0**-16 if name == "entropy_P" else 0.0
        np.testing.assert_allclose(got[present], want[present], rtol=tolerance, atol=0.0)
        assert np.isnan(got[~present]).all()
    if truth.tail_token_ids_PN is not None:
        np.testing.assert_array_equal(rows.tail_token_ids_PN, np.sort(truth.tail_token_ids_PN, axis=1))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    k=st.integers(1, 20),
    tail_samples=st.integers(0, 20),
    vocab_size=st.sampled_from([25, 300, 70_000, 2**24 - 1]),
    profile=st.sampled_from(sorted(PROFILES)),
    remap=st.booleans(),
)
def test_round_trip(
    seed: int, lengths: list[int], k: int, tail_samples: int, vocab_size: int, profile: str, remap: bool
) -> None:
    size = min(vocab_size, 100_000)
    items = [
        sequence(seed + i, n, k=k, tail_samples=tail_samples, vocab_size=size, absent=0.2)
        for i, n in enumerate(lengths)
    ]
    shard = Shard(shard_bytes(*items, vocab_size=vocab_size, profile=profile, remap=remap and vocab_size < 2**24 - 1))
    shard.verify()
    assert shard.num_sequences == len(items)
    assert shard.num_positions == sum(lengths)
    for number, (stored, item) in enumerate(zip(shard, items, strict=True)):
        assert_same(stored, item, profile)
        np.testing.assert_array_equal(shard.read_columns(number, ["input_ids"])["input_ids"], item.input_ids_L)
        assert number in shard.find(item.key)
    assert sum(shard.column_bytes().values()) < shard.size


def test_same_rows_give_the_same_bytes_whatever_the_order_of_draws() -> None:
    item = sequence(3)
    assert item.rows.tail_token_ids_PN is not None
    reversed_ = dataclasses.replace(item.rows, tail_token_ids_PN=item.rows.tail_token_ids_PN[:, ::-1].copy())
    assert shard_bytes(item) == shard_bytes(dataclasses.replace(item, rows=reversed_))


def test_open_reads_a_file_at_any_sequence(tmp_path: Path) -> None:
    items = [sequence(i, 10 + i) for i in range(5)]
    path = tmp_path / "a.tkc"
    path.write_bytes(shard_bytes(*items))
    with Shard.open(path) as shard:
        for i in (4, 0, 2):
            assert_same(shard.read(i), items[i])
        with pytest.raises(IndexError):
            shard.read(5)


def test_every_flipped_bit_is_refused() -> None:
    data = shard_bytes(sequence(1, 12), sequence(2, 5))
    for i in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[i] ^= 1 << bit
            with pytest.raises(ShardError):
                list(Shard(bytes(damaged)))


def test_every_flipped_bit_of_what_ranges_give_is_refused_or_says_nothing() -> None:
    """The head is not read, and the minor version of the trailer changes nothing of what is."""
    items = (sequence(1, 12), sequence(2, 5))
    data = shard_bytes(*items)
    minor = range(len(data) - TRAILER_SIZE + 54, len(data) - TRAILER_SIZE + 56)
    for i in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[i] ^= 1 << bit

            def fetch(offset: int, length: int, damaged: bytes = bytes(damaged)) -> bytes:
                assert offset >= HEADER_SIZE or length == len(data)
                return damaged[offset : offset + length]

            if i < HEADER_SIZE or i in minor:
                for stored, item in zip(Shard.ranged(len(data), fetch), items, strict=True):
                    assert_same(stored, item)
            else:
                with pytest.raises(ShardError):
                    list(Shard.ranged(len(data), fetch))


def test_without_the_head_the_trailer_says_the_version() -> None:
    data = shard_bytes(sequence(1))
    for field, error in ((52, UnsupportedVersion), (48, UnsupportedFeature), (60, NotAShard)):
        # the size is wrong, too: another version may have something else there
        damaged = bytearray(patched(data, len(data) - TRAILER_SIZE + 40, b"\xff"))
        damaged[len(data) - TRAILER_SIZE + field] ^= 0x80
        with pytest.raises(error):
            Shard.ranged(len(data), lambda offset, length, damaged=bytes(damaged): damaged[offset : offset + length])
    with pytest.raises(TruncatedShard, match="got 0"):
        Shard.ranged(len(data), lambda offset, length: b"")
    with pytest.raises(NotAShard):
        Shard.ranged(0, lambda offset, length: b"")


def test_every_truncation_and_any_extra_byte_is_refused() -> None:
    data = shard_bytes(sequence(1, 12), sequence(2, 5))
    for length in range(len(data)):
        with pytest.raises(ShardError):
            Shard(data[:length])
    with pytest.raises(ShardError):
        Shard(data + b"\0")


def test_random_bytes_are_not_a_shard() -> None:
    with pytest.raises(NotAShard):
        Shard(b"PAR1" + bytes(200))
    with pytest.raises(NotAShard):
        Shard(b"")


def patched(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


@pytest.mark.parametrize(
    ("offset", "value", "error"),
    [
        (0, b"XXXX", NotAShard),
        (4, struct.pack("<H", 2), UnsupportedVersion),
        (6, struct.pack("<H", 3), CorruptFooter),
        (8, struct.pack("<I", 2), UnsupportedFeature),
        (8, struct.pack("<I", 1 << 31), UnsupportedFeature),
        (8, struct.pack("<I", 0), CorruptFooter),
        (12, b"\x01", NotAShard),
        (-TRAILER_SIZE, bytes(8), CorruptFooter),
        (-TRAILER_SIZE + 8, struct.pack("<I", 1 << 20), LimitExceeded),
        (-TRAILER_SIZE + 12, struct.pack("<I", 1 << 31), CorruptFooter),
        (-TRAILER_SIZE + 16, struct.pack("<Q", 2**60), LimitExceeded),
        (-TRAILER_SIZE + 16, struct.pack("<Q", 0), LimitExceeded),
        (-TRAILER_SIZE + 24, bytes(8), CorruptIndex),
        (-TRAILER_SIZE + 32, bytes(8), CorruptFooter),
        (-TRAILER_SIZE + 40, struct.pack("<Q", 1), TruncatedShard),
        (-TRAILER_SIZE + 48, struct.pack("<I", 0), CorruptFooter),
        (-TRAILER_SIZE + 52, struct.pack("<H", 9), CorruptFooter),
        (-TRAILER_SIZE + 56, b"\x01", CorruptFooter),
        (-4, b"XXXX", NotAShard),
    ],
)
def test_each_broken_field_has_its_error(offset: int, value: bytes, error: type[ShardError]) -> None:
    data = shard_bytes(sequence(1))
    with pytest.raises(error):
        Shard(patched(data, offset % len(data), value))


METADATA = ShardMetadata(fingerprint(), 5, 4)


def hostile(streams: list[bytes], positions: int = 20, metadata: ShardMetadata = METADATA, **changes: object) -> bytes:
    """A shard of one frame made of these streams by an attacker, with checksums that match."""
    lengths = b"".join(struct.pack("<I", len(stream)) for stream in streams)
    frame = struct.pack("<IHH", positions, len(streams), 0) + lengths + b"".join(streams)
    entry = {"offset": HEADER_SIZE, "bytes": len(frame), "positions": positions, "key": sequence(0).key[:8]} | changes
    index = np.zeros(1, INDEX_DTYPE)
    index[0] = (entry["offset"], entry["bytes"], entry["positions"], entry["key"], xxhash.xxh3_64_intdigest(frame))
    head = struct.pack("<4sHHII", b"TKCS", 1, 0, 0, 0)
    return head + frame + Footer(metadata, None, index).to_bytes(HEADER_SIZE + len(frame), 0)


def first_stream(stream: bytes) -> list[bytes]:
    return [stream] + [b""] * (METADATA.num_streams - 1)


def test_a_declared_size_is_checked_before_memory_is_taken() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    with pytest.raises(CorruptFrame, match="declares 268435456 bytes where 20 are due"):
        list(Shard(hostile(first_stream(bomb))))


@pytest.mark.parametrize(
    "stream",
    [
        b"not zstd",
        zstandard.ZstdCompressor().compress(bytes(19)),
        zstandard.ZstdCompressor().compress(bytes(20)) + b"junk",
        zstandard.ZstdCompressor().compress(bytes(20)) * 2,
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20)),
        zstandard.ZstdCompressor().compress(bytes(20))[:-1],
    ],
)
def test_a_stream_is_exactly_one_frame_of_the_due_size(stream: bytes) -> None:
    with pytest.raises(CorruptFrame):
        Shard(hostile(first_stream(stream))).read_columns(0, ["input_ids"])


def test_a_frame_has_the_streams_of_the_metadata() -> None:
    for streams in ([], [b""], first_stream(b"")[1:], [*first_stream(b""), b""]):
        with pytest.raises(CorruptFrame):
            Shard(hostile(streams)).read(0)


def test_a_plane_above_the_limit_is_refused() -> None:
    metadata = ShardMetadata(fingerprint(), 4096, 0)
    with pytest.raises(LimitExceeded):
        Shard(hostile([b""] * metadata.num_streams, 1 << 22, metadata)).read(0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"offset": HEADER_SIZE - 1}, CorruptIndex),
        ({"offset": 2**63}, CorruptIndex),
        ({"bytes": 3}, CorruptIndex),
        ({"positions": 1}, LimitExceeded),
        ({"positions": 2**31}, LimitExceeded),
        ({"positions": 21}, CorruptFrame),
    ],
)
def test_index_must_tile_the_file_and_agree_with_the_frame(changes: dict[str, object], error: type[ShardError]) -> None:
    with pytest.raises(error):
        Shard(hostile(first_stream(b""), **changes)).read(0)


def test_index_key_must_be_that_of_the_tokens() -> None:
    data = shard_bytes(sequence(1))
    shard = Shard(data)
    index = shard.index.copy()
    index["key"] = np.void(bytes(8))
    offset = int(index["offset"][-1] + index["bytes"][-1])
    with pytest.raises(CorruptFrame, match="other tokens"):
        Shard(data[:offset] + Footer(shard.metadata, shard.table, index).to_bytes(offset, 1)).read(0)


def test_a_table_of_the_wrong_size_or_without_its_feature_is_refused() -> None:
    shard = Shard(shard_bytes(sequence(1)))
    offset = int(shard.index["offset"][-1] + shard.index["bytes"][-1])
    data = shard._data[:offset]
    for classes, features in ((np.zeros(999, np.uint8), 1), (np.zeros(1000, np.uint8), 0)):
        footer = Footer(shard.metadata, RemapTable(classes), shard.index).to_bytes(offset, features)
        with pytest.raises(CorruptTable):
            Shard(data[:8] + struct.pack("<I", features) + data[12:] + footer)


def test_any_table_is_a_bijection_that_rows_pass_through() -> None:
    rng = np.random.default_rng(0)
    table = RemapTable(rng.integers(0, 256, 1000).astype(np.uint8))
    ids = np.append(np.arange(1000), PAD_CODE).astype(np.uint32)
    codes = table.encode(ids)
    assert codes[-1] == PAD_CODE
    assert sorted(codes[:-1].tolist()) == list(range(1000))
    np.testing.assert_array_equal(table.decode(codes[:-1]), ids[:-1])


def test_metadata_states_the_rules_of_this_version_and_may_say_more() -> None:
    good = json.loads(METADATA.to_bytes())
    column = good["columns"][0]
    assert ShardMetadata.from_bytes(canonical_json(good | {"later": [1]})) == METADATA
    later = [*good["columns"], {"name": "later", "planes": 2, "transform": "new"}]
    assert ShardMetadata.from_bytes(canonical_json(good | {"columns": later})).num_streams == METADATA.num_streams + 2
    for change in (
        {"alignment": "row i predicts token i"},
        {"ties": "none"},
        {"profile": "fp8"},
        {"k": 0},
        {"k": True},
        {"k": 5000},
        {"columns": good["columns"][1:]},
        {"columns": [*good["columns"], column]},
        {"columns": [column | {"planes": 1}, *good["columns"][1:]]},
        {"columns": [column | {"transform": "other"}, *good["columns"][1:]]},
        {"columns": [*good["columns"], {"name": "later", "planes": 300, "transform": "new"}]},
        {"columns": [*good["columns"], {"name": "later", "planes": 1, "transform": 1}]},
        {"fingerprint": {}},
        {"writer": 1},
    ):
        with pytest.raises(ShardError):
            ShardMetadata.from_bytes(canonical_json(good | change))
    for change in ({"k": 0}, {"tail_samples": 4097}, {"fingerprint": good["fingerprint"] | {"vocab_size": 0}}):
        with pytest.raises(LimitExceeded, match=r"\(SPEC 9\)"):
            ShardMetadata.from_bytes(canonical_json(good | change))
    with pytest.raises(CorruptMetadata, match="canonical"):
        ShardMetadata.from_bytes(canonical_json(good).replace(b":", b": ", 1))


def test_unknown_columns_and_minor_versions_are_passed_over() -> None:
    item = sequence(3)
    plain = Shard(shard_bytes(item, remap=False))
    later = replace(plain.metadata, columns=(*plain.metadata.columns, Column("later", 2)))
    frame = plain._frame(0)
    split = 8 + 4 * plain.metadata.num_streams
    streams = plain.metadata.num_streams + 2
    body = struct.pack("<IHH", 20, streams, 0) + frame[8:split] + struct.pack("<II", 3, 0) + frame[split:] + b"new"
    index = plain.index.copy()
    index["bytes"], index["xxh3"] = len(body), xxhash.xxh3_64_intdigest(body)
    data = struct.pack("<4sHHII", b"TKCS", 1, 7, 0, 0) + body
    text = json.loads(plain.metadata.to_bytes())
    text["columns"].append({"name": "later", "planes": 2, "transform": "new"})
    footer = canonical_json(text) + index.tobytes()
    trailer = (len(data), len(footer) - 32, 0, 1, 20, xxhash.xxh3_64_intdigest(footer), len(data) + len(footer) + 64)
    whole = data + footer + struct.pack("<QIIQQQQIHHI4s", *trailer, 0, 1, 7, 0, b"TKCE")
    shard = Shard(whole)
    assert shard.metadata == later
    assert_same(shard.read(0), item)


def test_one_read_of_the_tail_and_one_of_the_frame_give_a_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [sequence(i, 30) for i in range(200)]
    path = tmp_path / "a.tkc"
    path.write_bytes(shard_bytes(*items))
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    with Shard.open(path) as shard:
        (number,) = shard.find(items[77].key)
        assert_same(shard.read(number), items[77])
    assert path.stat().st_size > 65536
    assert reads[0] == HEADER_SIZE
    assert reads[1:] == [65536, int(shard.index["bytes"][77])]


def changed(item: ScoredSequence, **columns: object) -> ScoredSequence:
    return dataclasses.replace(item, rows=dataclasses.replace(item.rows, **columns))


def test_writer_refuses_rows_it_cannot_hold_and_writes_nothing() -> None:
    item = sequence(5, ragged=False, absent=0, no_tail=0)
    rows = item.rows
    ids, values, log_tail = rows.token_ids_PK.copy(), rows.logprobs_PK.copy(), rows.log_tail_mass_P.copy()
    twice, order, nan, inner, positive = ids.copy(), values.copy(), values.copy(), ids.copy(), log_tail.copy()
    twice[3, 1], order[2], nan[0, 0], inner[4, 0], positive[1] = twice[3, 0], order[2, ::-1], np.nan, -1, 0.5
    bad = [
        changed(item, token_ids_PK=twice),
        changed(item, token_ids_PK=inner),
        changed(item, token_ids_PK=ids + 1000),
        changed(item, logprobs_PK=order),
        changed(item, logprobs_PK=nan),
        changed(item, logprobs_PK=-values),
        changed(item, log_tail_mass_P=positive),
        changed(item, log_tail_mass_P=np.full_like(log_tail, -np.inf)),
        changed(item, entropy_P=np.full_like(log_tail, np.nan)),
        changed(item, entropy_P=np.full_like(log_tail, np.finfo(np.float32).max)),
        changed(item, logsumexp_P=None),
        changed(item, tail_token_ids_PN=np.full((19, 4), 1000, np.int32)),
        changed(item, tail_token_ids_PN=None),
        dataclasses.replace(item, input_ids_L=item.input_ids_L + 1000),
        dataclasses.replace(item, segment_ids_L=np.zeros(20, np.int32)),
    ]
    file = io.BytesIO()
    writer = ShardWriter(file, ShardMetadata(fingerprint(), 5, 4))
    for wrong in bad:
        with pytest.raises(InvalidRows):
            writer.add(wrong)
    assert (writer.num_sequences, file.getvalue()) == (0, b"")
    with pytest.raises(InvalidRows, match="at least one sequence"):
        writer.finish()
    writer.add(item)
    writer.finish()
    assert_same(Shard(file.getvalue()).read(0), item)


def test_one_token_is_refused() -> None:
    item = sequence(0)
    with pytest.raises(InvalidRows, match="at least 2 tokens"):
        ScoredSequence(item.input_ids_L[:1], item.rows)
    with pytest.raises(InvalidRows, match="19 rows"):
        ScoredSequence(item.input_ids_L, sequence(0, 10).rows)


def test_verify_finds_what_reading_leaves_out() -> None:
    item = sequence(5, ragged=False, absent=0, no_tail=0)
    tail = item.rows.tail_token_ids_PN
    assert tail is not None
    in_support = tail.copy()
    in_support[7, 0] = item.rows.token_ids_PK[7, 2]
    shard = Shard(shard_bytes(changed(item, tail_token_ids_PN=in_support)))
    shard.read(0)
    with pytest.raises(CorruptFrame, match="support"):
        shard.verify()


@pytest.mark.parametrize(("profile", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_grids_are_those_of_torch(profile: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = -np.concatenate([np.geomspace(1e-9, 200, 20_001), [0.0]]).astype(np.float32)
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float32).numpy()
    grid = PROFILES[profile]
    np.testing.assert_array_equal(grid.decode(grid.encode(values)), expected)


def test_m5_keeps_five_bits_and_rounds_to_even() -> None:
    grid = PROFILES["m5"]
    for value, rounded in [(1.0, 1.0), (1 + 1 / 64, 1.0), (1 + 3 / 64, 1 + 2 / 32), (1.51, 1.5), (2 - 1 / 128, 2.0)]:
        assert grid.decode(grid.encode(np.array([-value])))[0] == -rounded
    codes = np.arange(grid.infinity, dtype=np.uint16)
    np.testing.assert_array_equal(grid.encode(grid.decode(codes)), codes)


def test_a_value_beyond_the_grid_is_refused() -> None:
    item = sequence(1, ragged=False, absent=0)
    values = item.rows.logprobs_PK.copy()
    values[3, -1] = -1e6
    writer = ShardWriter(io.BytesIO(), ShardMetadata(fingerprint(), 5, 4, "fp16"))
    with pytest.raises(InvalidRows, match="below what profile fp16 can hold"):
        writer.add(changed(item, logprobs_PK=values))


def test_sizes_are_what_the_spec_says() -> None:
    assert (HEADER_SIZE, TRAILER_SIZE, INDEX_DTYPE.itemsize) == (16, 64, 32)
