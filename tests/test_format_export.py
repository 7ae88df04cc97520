"""Export: what other tools read is what the shards hold."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_samples import sequence, shard_bytes
from tiny_cache import tiny_sequences, write_cache

from teachercache.format_spec import CorruptFrame, Manifest, ScoredSequence, Shard
from teachercache.format_spec import export as export_module
from teachercache.format_spec.codes import Code
from teachercache.format_spec.errors import SourceError, TargetError
from teachercache.format_spec.export import export
from teachercache.format_spec.shard_set import ShardSet

SEQUENCES = [sequence(i, 6 + 5 * i, absent=0.2) for i in range(5)]


def record(item: ScoredSequence) -> dict[str, Any]:
    """What an exported record must hold, in Python's own types."""
    rows = item.rows
    values: dict[str, Any] = {"input_ids": item.input_ids_L.tolist(), "loss_mask": item.loss_mask_L.tolist()}
    values["token_ids"] = [[i for i in row if i >= 0] for row in rows.token_ids_PK.tolist()]
    values["logprobs"] = [[v for v in row if v > -math.inf] for row in rows.logprobs_PK.tolist()]
    for name in ("log_tail_mass", "logsumexp", "entropy"):
        values[name] = [None if math.isnan(v) else v for v in getattr(rows, f"{name}_P").tolist()]
    values["tail_token_ids"] = [[i for i in row if i >= 0] for row in rows.tail_token_ids_PN.tolist()]
    return values


def plain(value: Any) -> Any:
    """A value that a tool gave, in Python's own types; tools spell a missing float NaN or None."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "a.tkc"
    path.write_bytes(shard_bytes(*SEQUENCES))
    return path


@pytest.fixture(scope="module")
def truth(shard: Path) -> list[dict[str, Any]]:
    with Shard.open(shard) as opened:
        return [record(item) for item in opened]


@pytest.fixture(scope="module")
def parquet(shard: Path) -> Path:
    assert export(ShardSet(shard), shard.with_suffix(".parquet")) == 5
    return shard.with_suffix(".parquet")


@pytest.fixture(scope="module")
def arrow(shard: Path) -> Path:
    assert export(ShardSet(shard), shard.with_suffix(".arrow")) == 5
    return shard.with_suffix(".arrow")


def test_samples_have_what_is_special(truth: list[dict[str, Any]]) -> None:
    rows = [row for item in truth for row in item["token_ids"]]
    assert {len(row) for row in rows} >= {0, 1, 5}
    assert any(None in item["entropy"] for item in truth)
    assert any(-math.inf in item["log_tail_mass"] for item in truth)


def test_pandas_reads_parquet(parquet: Path, truth: list[dict[str, Any]]) -> None:
    frame = pandas.read_parquet(parquet)
    assert [{name: plain(item) for name, item in row.items()} for row in frame.to_dict("records")] == truth


def test_polars_reads_parquet(parquet: Path, truth: list[dict[str, Any]]) -> None:
    assert polars.read_parquet(parquet).to_dicts() == truth


def test_duckdb_reads_parquet(parquet: Path, truth: list[dict[str, Any]]) -> None:
    with duckdb.connect() as database:
        found = database.execute("select * from read_parquet(?)", [str(parquet)])
        names = [column[0] for column in found.description]
        assert [dict(zip(names, row, strict=True)) for row in found.fetchall()] == truth
        query = "select sum(len(flatten(token_ids))) from read_parquet(?)"
        entries = database.execute(query, [str(parquet)]).fetchone()
    assert entries == (sum(len(row) for item in truth for row in item["token_ids"]),)


def test_datasets_reads_parquet(parquet: Path, truth: list[dict[str, Any]], tmp_path: Path) -> None:
    found = datasets.load_dataset("parquet", data_files=str(parquet), split="train", cache_dir=str(tmp_path))
    assert [{name: plain(item) for name, item in row.items()} for row in found] == truth


def test_arrow_ipc_is_read(arrow: Path, truth: list[dict[str, Any]]) -> None:
    with pa.ipc.open_file(arrow) as file:
        assert file.read_all().to_pylist() == truth
    assert polars.read_ipc(arrow).to_dicts() == truth
    frame = pandas.read_feather(arrow)
    assert [{name: plain(item) for name, item in row.items()} for row in frame.to_dict("records")] == truth


def test_the_schema_says_who_made_the_numbers(shard: Path, parquet: Path, arrow: Path) -> None:
    with Shard.open(shard) as opened, pa.ipc.open_file(arrow) as file:
        for schema in (pq.read_schema(parquet), file.schema):
            notes = schema.metadata
            assert json.loads(notes[b"teachercache.fingerprint"]) == opened.metadata.fingerprint.to_json()
            assert notes[b"teachercache.metadata"] == opened.metadata.to_bytes()


def test_columns_that_a_shard_lacks_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.tkc").write_bytes(shard_bytes(sequence(1, tail_samples=0)))
    export(ShardSet(tmp_path / "a.tkc"), tmp_path / "a.parquet")
    names = pq.read_schema(tmp_path / "a.parquet").names
    assert "tail_token_ids" not in names
    assert "segment_ids" not in names
    assert "entropy" in names


def test_a_cache_is_exported_in_the_order_of_the_data_set(tmp_path: Path) -> None:
    items = tiny_sequences()
    folder = write_cache(tmp_path / "cache", items)
    seen: list[tuple[int, int]] = []
    export(ShardSet(folder), tmp_path / "a.parquet", lambda done, total: seen.append((done, total)))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["input_ids"].to_pylist() == [item.input_ids_L.tolist() for item in items]
    assert seen == [(done, 24) for done in range(1, 25)]
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    assert table.schema.metadata[b"teachercache.manifest"].decode() == manifest.digest
    assert table.schema.metadata[b"teachercache.teacher_name"] == b"tiny"


def test_no_more_than_a_batch_is_held(
    shard: Path, truth: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a position takes 2 * 5 + 4 entries: 6 and 11 tokens stay below the limit, 16 reach it, 21 and 26 do each
    monkeypatch.setattr(export_module, "BATCH_ENTRIES", 250)
    export(ShardSet(shard), tmp_path / "a.parquet")
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)] == [3, 1, 1]
    assert file.read().to_pylist() == truth


def test_damage_of_an_export_is_found(parquet: Path, tmp_path: Path) -> None:
    data = bytearray(parquet.read_bytes())
    data[len(data) // 3] ^= 1
    (tmp_path / "damaged.parquet").write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(tmp_path / "damaged.parquet", page_checksum_verification=True)


def test_a_damaged_shard_leaves_no_export(shard: Path, tmp_path: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged.tkc").write_bytes(data)
    with pytest.raises(CorruptFrame, match=r"damaged\.tkc: sequence \d does not match its checksum"):
        export(ShardSet(tmp_path / "damaged.tkc"), tmp_path / "a.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.tkc"]


def test_targets_that_cannot_be(shard: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"is none of \.parquet, \.arrow, \.feather"):
        export(ShardSet(shard), tmp_path / "a.csv")
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="cannot write"):
        export(ShardSet(shard), tmp_path / "file" / "a.parquet")


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as missing:
        export(ShardSet(tmp_path / "none.tkc"), tmp_path / "a.parquet")
    assert missing.value.code is Code.NOT_FOUND
    with pytest.raises(SourceError, match=r"cannot read .*manifest\.json"):
        ShardSet(tmp_path)


def test_an_incomplete_cache_is_refused(tmp_path: Path) -> None:
    folder = write_cache(tmp_path / "cache", tiny_sequences())
    path = folder / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes())
    path.write_bytes(replace(manifest, sequences=30, complete=False).to_bytes())
    with pytest.raises(SourceError, match="holds 24 of 30 sequences"):
        export(ShardSet(folder), tmp_path / "a.parquet")
