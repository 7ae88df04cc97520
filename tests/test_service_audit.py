"""An audit finds rows that the teacher does not say, and lets rounding pass."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Bench, FakeEngine, fake_rows
from safetensors.torch import load_file, save_file
from tiny_server import VOCAB_SIZE, make_teacher, tiny_teacher

from teachercache import cli
from teachercache.format_spec import (
    CacheRequest,
    Code,
    Rows,
    ScoredSequence,
    Shard,
    ShardMetadata,
    ShardWriter,
)
from teachercache.format_spec.audit import AuditTally
from teachercache.format_spec.codes import EXIT_INTEGRITY
from teachercache.service.audit import AUDIT_EVERY, AUDIT_POSITIONS, audit_shard, check, is_audited
from teachercache.service.engines import Engine, load_engine
from teachercache.service.errors import AuditFailed

__all__ = ["tiny_teacher"]

ZEROS = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny teacher with an opinion, which is run for real: a random one says nearly the same everywhere."""
    return load_engine("transformers", sharpen(make_teacher(tmp_path_factory.mktemp("teacher"))))


def sharpen(folder: Path) -> Path:
    """Make a teacher's logits twenty times as large."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 20.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def spec_of(profile: str = "bf16", **settings: Any) -> CacheRequest:
    """What the rows were asked for with."""
    asked = {"k": 16, "min_prob": "0", "tail_samples": 16, "seed": 5} | settings
    names = {"teacher": ZEROS, "data": ZEROS, "engine": "transformers", "dtype": "float32", "head_dtype": "float32"}
    return CacheRequest(**names, **asked, profile=profile, shard_positions=1000)


def shard_of(engine: Engine, spec: CacheRequest, change: Any = lambda rows: rows, count: int = 12) -> Shard:
    """A shard of the engine's rows, changed before they are stored."""
    random = np.random.default_rng(2)
    ids = [random.integers(0, VOCAB_SIZE, 60).astype(np.int32) for _ in range(count)]
    file = BytesIO()
    metadata = ShardMetadata(engine.fingerprint(ZEROS, ZEROS), spec.k, spec.tail_samples, spec.profile)
    writer = ShardWriter(file, metadata)
    asked = {"k": spec.k, "tail_samples": spec.tail_samples, "seed": spec.seed, "min_prob": float(spec.min_prob)}
    for index, rows in sorted(engine.score(ids, **asked), key=lambda pair: pair[0]):
        writer.add(ScoredSequence(ids[index], change(rows)))
    writer.finish()
    return Shard(file.getvalue())


@pytest.mark.parametrize("profile", ["bf16", "fp16", "m5"])
@pytest.mark.parametrize("settings", [{}, {"tail_samples": 0}, {"min_prob": "0.01"}, {"k": 256, "tail_samples": 4}])
def test_what_the_teacher_says_passes(engine: Engine, profile: str, settings: dict[str, Any]) -> None:
    spec = spec_of(profile, **settings)
    tally = audit_shard(shard_of(engine, spec), engine)
    check(tally)
    assert tally.rows == 12 * 59 and 0 <= tally.mean_kl < (5e-3 if profile == "m5" else 1e-3)
    assert abs(tally.draws_z) < 3


def off_by_one(rows: Rows) -> Rows:
    """Each row a position too late."""
    return Rows.concatenate([rows[:1], rows[:-1]])


def another_teacher(rows: Rows) -> Rows:
    """Ids of a shuffled vocabulary."""
    draws = rows.tail_token_ids_PN
    assert draws is not None
    return replace(
        rows,
        token_ids_PK=((rows.token_ids_PK + 1) % VOCAB_SIZE).astype(np.int32),
        tail_token_ids_PN=np.sort((draws + 1) % VOCAB_SIZE).astype(np.int32),
    )


@pytest.mark.parametrize("change", [off_by_one, another_teacher])
def test_rows_of_other_positions_or_teachers_fail(engine: Engine, change: Any) -> None:
    spec = spec_of()
    with pytest.raises(AuditFailed, match="nats on average") as failed:
        check(audit_shard(shard_of(engine, spec, change), engine))
    assert failed.value.code is Code.AUDIT_FAILED


def test_draws_from_elsewhere_fail(engine: Engine) -> None:
    """The support is right, but each draw is one id that has no part in it."""
    spec = spec_of()

    def one_id(rows: Rows) -> Rows:
        return replace(rows, tail_token_ids_PN=next_id(rows.token_ids_PK))

    with pytest.raises(AuditFailed, match="standard deviations"):
        check(audit_shard(shard_of(engine, spec, one_id), engine))


def next_id(token_ids_PK: Any) -> Any:
    """Sixteen times the next id after the largest of the support that is not in it."""
    wrong = (token_ids_PK.max(1, keepdims=True) + 1) % VOCAB_SIZE
    while (clash := (wrong == token_ids_PK).any(1, keepdims=True)).any():
        wrong = np.where(clash, (wrong + 1) % VOCAB_SIZE, wrong)
    return np.repeat(wrong, 16, 1).astype(np.int32)


def test_an_absent_row_must_be_absent_again(engine: Engine) -> None:
    spec = spec_of(tail_samples=0)

    def hole(rows: Rows) -> Rows:
        ids, logprobs = rows.token_ids_PK.copy(), rows.logprobs_PK.copy()
        ids[3], logprobs[3] = -1, -np.inf
        columns = {
            name: np.where(np.arange(len(rows)) == 3, np.float32(np.nan), getattr(rows, name))
            for name in ("log_tail_mass_P", "logsumexp_P", "entropy_P")
        }
        return replace(rows, token_ids_PK=ids, logprobs_PK=logprobs, **columns)

    with pytest.raises(AuditFailed):
        check(audit_shard(shard_of(engine, spec, hole), engine))


def test_a_part_is_enough(engine: Engine) -> None:
    spec = spec_of()
    tally = audit_shard(shard_of(engine, spec, count=200), engine)
    assert AUDIT_POSITIONS * 0.9 < tally.rows + tally.rows / 59 <= AUDIT_POSITIONS
    assert [number for number in range(40) if is_audited(number)] == [0, AUDIT_EVERY, 2 * AUDIT_EVERY]


def test_tallies_add_up() -> None:
    whole, parts = AuditTally(), AuditTally()
    for seed in range(3):
        part = AuditTally()
        for tally in (whole, part):
            tally.add_kl(np.arange(seed, 4.0))
            tally.add_draws(seed, 2.0, 1.5)
        parts.merge(part.to_json())
    assert parts.to_json() == whole.to_json()
    assert AuditTally().mean_kl == AuditTally().draws_z == 0.0


def test_a_teacher_that_changes_its_mind_fails_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.submit()
    asked = []

    def forgetful(ids: Any, k: int) -> Rows:
        asked.append(ids)
        return fake_rows(ids if len(asked) <= 2 else (ids + 7) % 50, k)

    monkeypatch.setattr("fake_engine.fake_rows", forgetful)
    bench.worker(FakeEngine()).run()
    row = bench.row()
    assert row.state == "failed" and row.failure is not None and row.failure.code is Code.AUDIT_FAILED
    assert row.shards_done == 0


def test_a_cache_is_audited_later_against_any_teacher(
    tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = load_engine("transformers", tiny_teacher)
    shard = tmp_path / "shard.tkc"
    shard.write_bytes(shard_of(engine, spec_of())._data)
    command = ["audit", str(shard), "--json", "--teacher"]
    assert cli.main([*command, str(tiny_teacher)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 12 * 59 and found["mean_kl"] < 1e-3 and found["same_teacher"] is False
    other = make_teacher(tmp_path / "other", seed=1)
    sharpen(other)
    assert cli.main([*command, str(other)]) == EXIT_INTEGRITY
    assert "audit_failed" in capsys.readouterr().err
