"""repack: coarser values, smaller supports, and nothing else."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_samples import fingerprint, sequence, shard_bytes
from tiny_cache import tiny_sequences, write_cache

from teachercache.cli import main
from teachercache.format_spec import InvalidRows, LimitExceeded, Manifest, Shard, ShardMetadata, ShardWriter
from teachercache.format_spec.errors import TargetError
from teachercache.format_spec.profiles import PROFILES
from teachercache.format_spec.repack import FINENESS, repack, shrink
from teachercache.format_spec.shard_set import ShardSet
from teachercache.format_spec.verify import verify

SEQUENCES = [sequence(i, 12 + i, absent=0.2) for i in range(6)]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    (tmp_path / "a.tkc").write_bytes(shard_bytes(*SEQUENCES))
    return tmp_path / "a.tkc"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", tiny_sequences())


def manifest_of(folder: Path) -> Manifest:
    return Manifest.from_bytes((folder / "manifest.json").read_bytes())


def test_finer_profiles_stand_first() -> None:
    values = np.random.default_rng(0).uniform(0.1, 30, 1000)
    errors = [np.abs(PROFILES[name].decode(PROFILES[name].encode(-values)) + values).max() for name in FINENESS]
    assert set(FINENESS) == set(PROFILES)
    assert errors == sorted(errors)


@pytest.mark.parametrize(("old", "new"), [("fp16", "bf16"), ("fp16", "m5"), ("bf16", "m5"), ("bf16", "bf16")])
def test_repack_writes_coarser_values_and_nothing_else(tmp_path: Path, old: str, new: str) -> None:
    (tmp_path / "old.tkc").write_bytes(shard_bytes(*SEQUENCES, profile=old))
    repack(ShardSet(tmp_path / "old.tkc"), tmp_path / "new.tkc", profile=new)
    with Shard.open(tmp_path / "old.tkc") as before, Shard.open(tmp_path / "new.tkc") as after:
        assert after.metadata == replace(before.metadata, profile=new)
        for was, now in zip(before, after, strict=True):
            np.testing.assert_array_equal(now.input_ids_L, was.input_ids_L)
            np.testing.assert_array_equal(now.rows.token_ids_PK, was.rows.token_ids_PK)
            np.testing.assert_array_equal(now.rows.log_tail_mass_P, was.rows.log_tail_mass_P)
            np.testing.assert_array_equal(now.rows.entropy_P, was.rows.entropy_P)
            expected = PROFILES[new].decode(PROFILES[new].encode(was.rows.logprobs_PK))
            np.testing.assert_array_equal(now.rows.logprobs_PK, expected)
    same = (tmp_path / "old.tkc").read_bytes() == (tmp_path / "new.tkc").read_bytes()
    assert same is (old == new)


def test_repack_makes_a_new_cache(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repack", str(cache), str(tmp_path / "new"), "--profile", "m5", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    before, after = manifest_of(cache), manifest_of(tmp_path / "new")
    assert done["manifest"] == after.digest
    assert after.request == replace(before.request, profile="m5")
    assert after.request.id != before.request.id
    assert (after.fingerprint, after.teacher_name, after.quality) == (before.fingerprint, "tiny", before.quality)
    assert [(s.first, s.sequences, s.positions) for s in after.shards] == [
        (s.first, s.sequences, s.positions) for s in before.shards
    ]
    assert after.complete
    assert verify(ShardSet(tmp_path / "new")) == []
    assert done["bytes"] == after.num_bytes < before.num_bytes


def test_an_incomplete_cache_stays_incomplete(cache: Path, tmp_path: Path) -> None:
    manifest = manifest_of(cache)
    partial = replace(manifest, shards=manifest.shards[1:], complete=False)
    (cache / "manifest.json").write_bytes(partial.to_bytes())
    repack(ShardSet(cache), tmp_path / "new", profile="m5")
    after = manifest_of(tmp_path / "new")
    assert (after.complete, after.sequences) == (False, 24)
    assert [shard.first for shard in after.shards] == [shard.first for shard in partial.shards]


def test_a_smaller_support_gives_its_mass_to_the_tail(tmp_path: Path) -> None:
    items = [sequence(i, 30, k=9, tail_samples=0, absent=0.2) for i in range(3)]
    # rows of a real teacher add up to 1
    for item in items:
        rows = item.rows
        total = np.log(np.exp(rows.logprobs_PK).sum(axis=1) + np.exp(np.nan_to_num(rows.log_tail_mass_P)))
        rows.logprobs_PK[:] -= total[:, None]
        rows.log_tail_mass_P[:] -= total
    (tmp_path / "old.tkc").write_bytes(shard_bytes(*items))
    assert main(["repack", str(tmp_path / "old.tkc"), str(tmp_path / "new.tkc"), "--k", "4"]) == 0
    with Shard.open(tmp_path / "old.tkc") as before, Shard.open(tmp_path / "new.tkc") as after:
        after.verify()
        assert after.metadata.k == 4
        for was, now in zip(before, after, strict=True):
            np.testing.assert_array_equal(now.rows.token_ids_PK, was.rows.token_ids_PK[:, :4])
            np.testing.assert_array_equal(now.rows.logprobs_PK, was.rows.logprobs_PK[:, :4])
            tail = np.exp(was.rows.log_tail_mass_P) + np.exp(was.rows.logprobs_PK[:, 4:]).sum(axis=1)
            np.testing.assert_allclose(np.exp(now.rows.log_tail_mass_P), np.minimum(tail, 1), rtol=1e-5)
            np.testing.assert_array_equal(now.rows.entropy_P, was.rows.entropy_P)


def test_a_tail_mass_never_gets_above_one() -> None:
    rows = sequence(0, 5, tail_samples=0, ragged=False, absent=0, no_tail=0).rows
    rows.logprobs_PK[:] = -0.1
    assert (shrink(rows, 2).log_tail_mass_P == 0).all()


def test_repack_refuses_what_would_be_wrong(shard: Path, tmp_path: Path) -> None:
    shards, target = ShardSet(shard), tmp_path / "new.tkc"
    for cut in (lambda: repack(shards, target, k=4), lambda: shrink(SEQUENCES[0].rows, 4)):
        with pytest.raises(InvalidRows, match=r"must not shrink from k 5 to 4, .* or a min_prob"):
            cut()
    with pytest.raises(InvalidRows, match="profile fp16 is finer than bf16"):
        repack(shards, target, profile="fp16")
    with pytest.raises(LimitExceeded, match="k 6 is above 5"):
        repack(shards, target, k=6)
    assert not target.exists()


def test_a_writer_refuses_rows_of_another_k_and_names_the_better_way() -> None:
    rows = SEQUENCES[0].rows
    cut = replace(rows, token_ids_PK=rows.token_ids_PK[:, :4], logprobs_PK=rows.logprobs_PK[:, :4])
    writer = ShardWriter(io.BytesIO(), ShardMetadata(fingerprint(), 5, 4))
    with pytest.raises(
        InvalidRows, match=r"rows have k 4 and 4 tail samples, the shard 5 and 4; .* min_prob cut before"
    ):
        writer.add(replace(SEQUENCES[0], rows=cut))


def test_repack_never_writes_over_a_cache(cache: Path) -> None:
    with pytest.raises(TargetError, match="holds a cache already"):
        repack(ShardSet(cache), cache, profile="m5")
