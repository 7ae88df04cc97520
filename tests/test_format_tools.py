"""inspect and verify; export and import as commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_samples import sequence, shard_bytes
from tiny_cache import tiny_sequences, write_cache

from teachercache.cli import main
from teachercache.client.blobs import BlobCache
from teachercache.format_spec import Manifest, Shard, digest_file
from teachercache.format_spec.shard_set import ShardSet
from teachercache.format_spec.summary import summarise
from teachercache.format_spec.tokenizer_identity import tokenizer_digest
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


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """What a command that must succeed prints with --json."""
    assert run(*arguments, "--json") == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_inspect_counts_what_is_there(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "inspect", shard)
    rows = [item.rows for item in SEQUENCES]
    present = [~part.absent_P for part in rows]
    masses = np.concatenate(
        [1 - np.exp(part.log_tail_mass_P[mask].astype(np.float64)) for part, mask in zip(rows, present, strict=True)]
    )
    entropies = np.concatenate([part.entropy_P[mask] for part, mask in zip(rows, present, strict=True)])
    assert (found["sequences"], found["positions"]) == (6, sum(map(len, SEQUENCES)))
    assert found["rows"] == sum(map(len, rows))
    assert found["absent_rows"] == sum(int((~mask).sum()) for mask in present) > 0
    assert found["full_rows"] == sum(int((part.token_ids_PK >= 0).all(axis=1).sum()) for part in rows) > 0
    assert found["full_share"] == pytest.approx(found["full_rows"] / len(masses))
    assert found["mean_support_mass"] == pytest.approx(masses.mean(), abs=1e-6)
    assert found["mean_entropy"] == pytest.approx(entropies.mean(dtype=np.float64), abs=1e-6)
    assert found["support_mass_histogram"] == np.histogram(masses, np.linspace(0, 1, 11))[0].tolist()
    assert found["bytes"] == shard.stat().st_size
    with Shard.open(shard) as opened:
        assert found["column_bytes"] == opened.column_bytes()
        assert found["fingerprint"] == opened.metadata.fingerprint.to_json()
    assert (found["k"], found["tail_samples"], found["profile"]) == (5, 4, "bf16")


def test_the_example_is_a_row_that_counts(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = answer(capsys, "inspect", shard)["example"]
    item, i = SEQUENCES[example["sequence"]], example["position"]
    assert item.counted_P[i]
    assert example["context"] == item.input_ids_L[max(i - 7, 0) : i + 1].tolist()
    assert example["next_token"] == item.input_ids_L[i + 1]
    kept = item.rows.token_ids_PK[i] >= 0
    assert example["token_ids"] == item.rows.token_ids_PK[i][kept].tolist()
    assert example["probabilities"] == pytest.approx(np.exp(item.rows.logprobs_PK[i][kept]).tolist(), rel=0.05)
    assert example["tail_mass"] == pytest.approx(float(np.exp(item.rows.log_tail_mass_P[i])))


def test_inspect_adds_up_a_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, manifest = answer(capsys, "inspect", cache), manifest_of(cache)
    assert (found["shards"], found["sequences"], found["bytes"]) == (3, 24, manifest.num_bytes)
    assert (found["manifest"], found["teacher_name"]) == (manifest.digest, "tiny")
    assert tuple(found["support_mass_histogram"]) == manifest.quality.support_mass_histogram
    assert f"{found['mean_entropy']:.6f}" == manifest.quality.mean_entropy


def test_inspect_is_readable(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", shard) == 0
    text = capsys.readouterr().out
    summary = summarise(ShardSet(shard))
    for part in (
        f"teacher    {summary.metadata.fingerprint.teacher}",
        "stored     k 5, 4 tail samples, profile bf16",
        f"rows       {summary.rows}, {summary.absent_rows} absent",
        "in one shard",
        "  0.9 to 1.0",
        "  token_ids ",
        "  around them ",
        "row 5 of sequence 0, after ",
    ):
        assert part in text


def test_a_digest_names_a_shard_in_the_local_cache(
    shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHERCACHE_CACHE_DIR", str(tmp_path / "local"))
    digest = digest_file(shard)
    assert run("inspect", digest) == 3
    assert capsys.readouterr().err.endswith("does not exist [not_found]\n")
    path = BlobCache().path(digest)
    path.parent.mkdir(parents=True)
    shutil.copy(shard, path)
    assert answer(capsys, "inspect", digest)["bytes"] == shard.stat().st_size


def test_tokens_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = summarise(ShardSet(write_cache(tmp_path / "any", tiny_sequences()))).example
    assert example is not None
    pieces = {
        "\u0120caf\u00c3\u00a9": example.token_ids[0],
        "plain": example.token_ids[1],
        "\u2581ok": example.token_ids[2],
    }
    value = {"model": {"vocab": pieces}, "decoder": {"type": "ByteLevel"}}
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(value))
    digest = tokenizer_digest(tmp_path / "tokenizer")
    folder = write_cache(tmp_path / "cache", tiny_sequences(), tokenizer=digest)
    assert run("inspect", folder, "--tokenizer", tmp_path / "tokenizer") == 0
    lines = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]
    # the third letter stands for no byte, so it is not of the byte-level alphabet
    assert {"' caf\u00e9'", "'plain'", "' ok'", "(no piece)"} <= set(lines)


def test_another_tokenizer_shows_nothing(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1}}}))
    assert run("inspect", cache, "--tokenizer", tmp_path) == 6
    assert capsys.readouterr().err.endswith("[tokenizer_mismatch]\n")


def test_verify_passes_what_is_sound(shard: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "verify", shard) == {"path": str(shard), "shards": 1, "damaged": []}
    assert answer(capsys, "verify", cache) == {"path": str(cache), "shards": 3, "damaged": []}


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.9, 0.999])
def test_verify_finds_a_flipped_bit_of_a_shard(shard: Path, where: float, capsys: pytest.CaptureFixture[str]) -> None:
    flip(shard, where)
    assert run("verify", shard) == 6
    out = capsys.readouterr().out
    assert "damaged  1" in out
    assert f"  {shard}: " in out


def test_verify_names_every_damaged_shard_of_a_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (member.path for member in ShardSet(cache).members)
    flip(first, 0.5)
    third.unlink()
    assert run("verify", cache, "--json") == 6
    damaged = json.loads(capsys.readouterr().out)["damaged"]
    assert [entry["shard"] for entry in damaged] == [str(first), str(third)]
    assert "another digest" in damaged[0]["error"]
    assert "cannot read" in damaged[1]["error"]
    shutil.copy(second, first)
    assert "has other sequences" in verify(ShardSet(cache))[0].error


def test_verify_knows_the_teacher_of_a_cache(cache: Path) -> None:
    path, manifest = cache / "manifest.json", manifest_of(cache)
    other = replace(manifest, request=replace(manifest.request, k=manifest.request.k + 1))
    path.write_bytes(other.to_bytes())
    assert "was made by another teacher, or otherwise" in verify(ShardSet(cache))[0].error


def test_export_and_import_as_commands(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported = answer(capsys, "export", cache, tmp_path / "a.parquet")
    assert exported["digest"] == digest_file(tmp_path / "a.parquet")
    done = answer(capsys, "import", tmp_path / "a.parquet", tmp_path / "new", "--shard-positions", "50")
    after = manifest_of(tmp_path / "new")
    assert (done["manifest"], done["layout"], done["sequences"]) == (after.digest, "rows", 24)
    assert len(after.shards) > 3
    assert run("import", tmp_path / "a.parquet", tmp_path / "a.tkc", "--profile", "m5") == 0
    assert f"digest     {digest_file(tmp_path / 'a.tkc')}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["verify", "none"], 3, "does not exist [not_found]"),
        (["verify", "empty"], 3, "No such file or directory [not_found]"),
        (["inspect", "none.tkc"], 3, "does not exist [not_found]"),
        (["inspect", "text"], 6, "does not begin with"),
        (["export", "text", "a.csv"], 2, "is none of .parquet"),
        (["export", "text", "a.parquet"], 6, "text: does not begin with"),
        (["import", "text", "b.tkc"], 2, "cannot be read as Parquet"),
        (["import", "none.parquet", "b.tkc"], 3, "No such file or directory [not_found]"),
        (["import", "text", "b.tkc", "--teacher", "t"], 2, "name both --teacher and --tokenizer, or neither"),
        (["repack", "none", "b.tkc"], 3, "does not exist [not_found]"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no shard, no Parquet, and long enough to be looked at: " + "x" * 100)
    Path("empty").mkdir()
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("teachercache: error: ")
    assert message in line
