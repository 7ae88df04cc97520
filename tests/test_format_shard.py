"""Shards: what is written is what is read, and nothing damaged is read at all."""

from __future__ import annotations

import dataclasses
import io
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from format_samples import fingerprint, sequence, shard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from teachercache.format_spec import (
    CorruptFrame,
    CorruptHeader,
    CorruptIndex,
    InvalidRows,
    LimitExceeded,
    NotAShard,
    ScoredSequence,
    Shard,
    ShardError,
    ShardHeader,
    ShardWriter,
    TruncatedShard,
    UnsupportedFeature,
    UnsupportedVersion,
)
from teachercache.format_spec.frame import from_bf16_codes, to_bf16_codes
from teachercache.format_spec.header import HEADER_SIZE
from teachercache.format_spec.shard import TRAILER_SIZE


def assert_same(stored: ScoredSequence, given_: ScoredSequence) -> None:
    rows, truth = stored.rows, given_.rows
    np.testing.assert_array_equal(stored.input_ids_L, given_.input_ids_L)
    mask = np.ones(len(given_), bool) if given_.loss_mask_L is None else given_.loss_mask_L
    np.testing.assert_array_equal(stored.loss_mask_L, mask)
    np.testing.assert_array_equal(rows.token_ids_PK, truth.token_ids_PK)
    finite = np.isfinite(truth.logprobs_PK)
    np.testing.assert_array_equal(np.isfinite(rows.logprobs_PK), finite)
    # bf16 keeps 8 significant bits: half a unit in the last place is 2^-9 relative
    np.testing.assert_allclose(rows.logprobs_PK[finite], truth.logprobs_PK[finite], rtol=2.0**-8, atol=1e-30)
    present = ~truth.absent_P
    for name in ("log_tail_mass_P", "logsumexp_P", "entropy_P"):
        got, want = getattr(rows, name), getattr(truth, name)
        np.testing.assert_array_equal(got[present], want[present])
        assert np.isnan(got[~present]).all()
    if truth.tail_token_ids_PN is not None:
        np.testing.assert_array_equal(rows.tail_token_ids_PN, np.sort(truth.tail_token_ids_PN, axis=1))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    k=st.integers(1, 20),
    tail_samples=st.integers(0, 20),
    vocab_size=st.sampled_from([25, 300, 70_000, 2**24 - 1]),
)
def test_round_trip(seed: int, lengths: list[int], k: int, tail_samples: int, vocab_size: int) -> None:
    size = min(vocab_size, 100_000)
    items = [
        sequence(seed + i, n, k=k, tail_samples=tail_samples, vocab_size=size, absent=0.2)
        for i, n in enumerate(lengths)
    ]
    shard = Shard(shard_bytes(*items, vocab_size=vocab_size))
    shard.verify()
    assert shard.num_sequences == len(items)
    assert shard.num_positions == sum(lengths)
    for stored, item in zip(shard, items, strict=True):
        assert_same(stored, item)


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
        (4, struct.pack("<H", 1), UnsupportedVersion),
        (6, struct.pack("<H", 2), UnsupportedVersion),
        (8, struct.pack("<I", 1), UnsupportedFeature),
        (8, struct.pack("<I", 1 << 31), UnsupportedFeature),
        (12, struct.pack("<I", 1 << 20), LimitExceeded),
        (16, bytes(8), CorruptHeader),
        (24, b"\x01", CorruptHeader),
        (-TRAILER_SIZE, bytes(8), CorruptIndex),
        (-TRAILER_SIZE + 8, struct.pack("<Q", 2**60), LimitExceeded),
        (-TRAILER_SIZE + 24, bytes(8), CorruptIndex),
        (-TRAILER_SIZE + 32, struct.pack("<Q", 1), TruncatedShard),
        (-TRAILER_SIZE + 40, struct.pack("<H", 9), UnsupportedVersion),
        (-4, b"XXXX", NotAShard),
    ],
)
def test_each_broken_field_has_its_error(offset: int, value: bytes, error: type[ShardError]) -> None:
    data = shard_bytes(sequence(1))
    with pytest.raises(error):
        Shard(patched(data, offset % len(data), value))


def rebuilt(frame: bytes, positions: int = 20, **trailer: int) -> bytes:
    """A shard around a frame of an attacker, with checksums that match."""
    prefix = ShardHeader(fingerprint(), 5, 4).to_bytes()
    item = sequence(0)
    entry = struct.pack("<QII", len(prefix), len(frame), positions) + item.key[:8]
    index = entry + struct.pack("<Q", xxhash.xxh3_64_intdigest(frame))
    size = len(prefix) + len(frame) + len(index) + TRAILER_SIZE
    fields = {"offset": len(prefix) + len(frame), "sequences": 1, "positions": positions, "size": size} | trailer
    return (
        prefix
        + frame
        + index
        + struct.pack(
            "<QQQQQHH4s",
            fields["offset"],
            fields["sequences"],
            fields["positions"],
            xxhash.xxh3_64_intdigest(index),
            fields["size"],
            0,
            1,
            b"TKCE",
        )
    )


def hostile(streams: list[bytes], positions: int = 20) -> bytes:
    lengths = b"".join(struct.pack("<I", len(stream)) for stream in streams)
    return struct.pack("<IHH", positions, len(streams), 0) + lengths + b"".join(streams)


NUM_STREAMS = ShardHeader(fingerprint(), 5, 4).num_streams


def test_a_declared_size_is_checked_before_memory_is_taken() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    with pytest.raises(CorruptFrame, match="declares 268435456 bytes where 20 are due"):
        Shard(rebuilt(hostile([bomb] + [b""] * (NUM_STREAMS - 1)))).read(0)


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
        Shard(rebuilt(hostile([stream] + [b""] * (NUM_STREAMS - 1)))).read(0)


def test_a_plane_above_the_limit_is_refused() -> None:
    header = ShardHeader(fingerprint(), 4096, 0)
    frame = struct.pack("<IHH", 1 << 22, header.num_streams, 0) + bytes(4 * header.num_streams)
    from teachercache.format_spec.frame import decode_frame

    with pytest.raises(LimitExceeded):
        decode_frame(frame, header, 1 << 22)


def test_index_must_tile_the_file() -> None:
    data = shard_bytes(sequence(1), sequence(2))
    (offset,) = struct.unpack("<Q", data[-TRAILER_SIZE : -TRAILER_SIZE + 8])
    index = bytearray(data[offset:-TRAILER_SIZE])
    struct.pack_into("<Q", index, 32, struct.unpack_from("<Q", index, 32)[0] - 1)
    damaged = patched(data, offset, bytes(index))
    damaged = patched(damaged, len(data) - TRAILER_SIZE + 24, struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(index))))
    with pytest.raises(CorruptIndex, match="tile"):
        Shard(damaged)


def test_index_key_must_be_that_of_the_tokens() -> None:
    data = shard_bytes(sequence(1))
    (offset,) = struct.unpack("<Q", data[-TRAILER_SIZE : -TRAILER_SIZE + 8])
    index = patched(data[offset:-TRAILER_SIZE], 16, bytes(8))
    damaged = patched(data, offset, index)
    damaged = patched(damaged, len(data) - TRAILER_SIZE + 24, struct.pack("<Q", xxhash.xxh3_64_intdigest(index)))
    with pytest.raises(CorruptFrame, match="other tokens"):
        Shard(damaged).read(0)


def test_header_must_state_the_rules_of_this_version() -> None:
    from teachercache.format_spec import canonical_json

    good = ShardHeader(fingerprint(), 5, 4).to_json()
    for change in (
        {"alignment": "row i predicts token i"},
        {"profile": "fp16"},
        {"k": 0},
        {"k": True},
        {"columns": good["columns"][:-1]},
        {"columns": good["columns"][::-1]},
        {"columns": [dict(column, planes=1) for column in good["columns"]]},
        {"fingerprint": {}},
        {"surprise": 1},
    ):
        with pytest.raises(ShardError):
            ShardHeader.from_json(good | change)
    text = canonical_json(good).replace(b":", b": ", 1)
    fixed = struct.pack("<4sHHIIQQ", b"TKCS", 0, 1, 0, len(text), xxhash.xxh3_64_intdigest(text), 0)
    with pytest.raises(CorruptHeader, match="canonical"):
        Shard(fixed + text + bytes(200))


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
        changed(item, logsumexp_P=None),
        changed(item, tail_token_ids_PN=np.full((19, 4), 1000, np.int32)),
        changed(item, tail_token_ids_PN=None),
        dataclasses.replace(item, input_ids_L=item.input_ids_L + 1000),
        dataclasses.replace(item, segment_ids_L=np.zeros(20, np.int32)),
    ]
    file = io.BytesIO()
    writer = ShardWriter(file, ShardHeader(fingerprint(), 5, 4))
    size = len(file.getvalue())
    for wrong in bad:
        with pytest.raises(InvalidRows):
            writer.add(wrong)
    assert len(file.getvalue()) == size
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


def test_bf16_grid_is_torch_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    values = -np.concatenate([np.geomspace(1e-30, 200, 20_001), [0.0]]).astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(from_bf16_codes(to_bf16_codes(values)), expected)


def test_header_size_is_what_the_spec_says() -> None:
    assert (HEADER_SIZE, TRAILER_SIZE) == (32, 48)
