"""Import: exported rows come back as they were, plain rows become shards, and what is none is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_samples import sequence, shard_bytes
from tiny_cache import tiny_sequences, write_cache

from teachercache.client.directory import CacheDirectory
from teachercache.client.source import DirectorySource
from teachercache.format_spec import InvalidRows, Manifest, Shard, digest_bytes, digest_file
from teachercache.format_spec.errors import FormatError, SourceError, TargetError
from teachercache.format_spec.export import export
from teachercache.format_spec.importer import Imported, Origin, import_rows
from teachercache.format_spec.profiles import PROFILES
from teachercache.format_spec.shard_set import ShardSet
from teachercache.format_spec.support import log_tail_mass, ranked

ORIGIN = Origin("some teacher", digest_bytes(b"tokenizer"), 1000)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tail_samples", [0, 4])
def test_an_exported_shard_comes_back_byte_for_byte(tmp_path: Path, profile: str, tail_samples: int) -> None:
    items = [sequence(i, 4 + 7 * i, absent=0.2, tail_samples=tail_samples) for i in range(4)]
    (tmp_path / "a.tkc").write_bytes(shard_bytes(*items, profile=profile))
    export(ShardSet(tmp_path / "a.tkc"), tmp_path / "a.parquet")
    assert import_rows(tmp_path / "a.parquet", tmp_path / "b.tkc") == Imported("rows", 4, ())
    assert (tmp_path / "b.tkc").read_bytes() == (tmp_path / "a.tkc").read_bytes()


def test_an_exported_cache_becomes_a_cache_that_can_be_streamed(tmp_path: Path) -> None:
    old = write_cache(tmp_path / "old", tiny_sequences())
    export(ShardSet(old), tmp_path / "a.parquet")
    import_rows(tmp_path / "a.parquet", tmp_path / "new", shard_positions=60)
    before, after = (Manifest.from_bytes((folder / "manifest.json").read_bytes()) for folder in (old, tmp_path / "new"))
    assert (after.fingerprint, after.teacher_name, after.quality) == (before.fingerprint, "tiny", before.quality)
    assert after.request.data == digest_file(tmp_path / "a.parquet")
    assert (after.complete, after.sequences, after.num_positions) == (True, 24, before.num_positions)
    # as many sequences a shard as fit, and no fewer
    lengths = iter(len(item) for item in tiny_sequences())
    cut = [[next(lengths) for _ in range(shard.sequences)] for shard in after.shards]
    assert all(sum(group) <= 60 for group in cut)
    assert all(sum(group) + following[0] > 60 for group, following in pairwise(cut))
    source = DirectorySource(CacheDirectory(tmp_path / "new"))
    stored = [item for shard in after.shards for item in source.open(shard)]
    for got, wanted in zip(stored, ShardSet(old).sequences(), strict=True):
        np.testing.assert_array_equal(got.input_ids_L, wanted.input_ids_L)
        np.testing.assert_array_equal(got.loss_mask_L, wanted.loss_mask_L)
        np.testing.assert_array_equal(got.rows.logprobs_PK, wanted.rows.logprobs_PK)
        # draws have no order
        drawn, meant = (np.sort(item.rows.tail_token_ids_PN, axis=1) for item in (got, wanted))
        np.testing.assert_array_equal(drawn, meant)


def test_another_profile_may_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.tkc").write_bytes(shard_bytes(sequence(0)))
    export(ShardSet(tmp_path / "a.tkc"), tmp_path / "a.parquet")
    import_rows(tmp_path / "a.parquet", tmp_path / "b.tkc", profile="m5")
    with Shard.open(tmp_path / "b.tkc") as shard:
        assert shard.metadata.profile == "m5"
    import_rows(tmp_path / "a.parquet", tmp_path / "cache", profile="m5")
    manifest = CacheDirectory(tmp_path / "cache").manifest()
    assert (manifest.request.profile, manifest.shards[0].digest) == ("m5", digest_file(tmp_path / "b.tkc"))
    # a lone shard knows its teacher by digest alone
    assert manifest.teacher_name == manifest.fingerprint.teacher


def plain_table(**columns: Any) -> pa.Table:
    """Two sequences of three rows in all, as any tool may write them."""
    third = float(np.log(1 / 3))
    rows: dict[str, Any] = {
        "input_ids": [[5, 6, 7], [8, 9]],
        # the second row in no order, the third with an impossible token
        "token_ids": [[[1, 2], [3, 4, 5]], [[6, 7]]],
        "logprobs": [[[-0.25, -2.0], [-3.0, -0.5, -1.5]], [[third, float("-inf")]]],
    }
    return pa.table(rows | columns)


def imported(tmp_path: Path, table: pa.Table, **settings: Any) -> Shard:
    pq.write_table(table, tmp_path / "plain.parquet")
    import_rows(tmp_path / "plain.parquet", tmp_path / "plain.tkc", origin=ORIGIN, profile="fp16", **settings)
    return Shard.open(tmp_path / "plain.tkc")


def test_plain_rows_are_put_in_order_and_get_their_tail(tmp_path: Path) -> None:
    with imported(tmp_path, plain_table()) as shard:
        assert (shard.metadata.k, shard.metadata.tail_samples) == (3, 0)
        assert [column.name for column in shard.metadata.columns] == [
            "input_ids", "loss_mask", "token_ids", "logprobs", "log_tail_mass",
        ]  # fmt: skip
        first, second = shard
    assert first.rows.token_ids_PK.tolist() == [[1, 2, -1], [4, 5, 3]]
    assert second.rows.token_ids_PK.tolist() == [[6, -1, -1]]
    assert first.rows.logprobs_PK[1].tolist() == [-0.5, -1.5, -3.0]
    masses = [np.exp([-0.25, -2.0]).sum(), np.exp([-3.0, -0.5, -1.5]).sum(), 1 / 3]
    tails = np.concatenate([first.rows.log_tail_mass_P, second.rows.log_tail_mass_P])
    np.testing.assert_allclose(np.exp(tails), 1 - np.array(masses), rtol=1e-6)
    assert first.loss_mask_L is not None and first.loss_mask_L.all()


def test_identity_of_imported_rows_claims_nothing(tmp_path: Path) -> None:
    with imported(tmp_path, plain_table()) as shard:
        maker = shard.metadata.fingerprint
    assert (maker.engine, maker.kernel, maker.dtype, maker.vocab_size) == ("import", "rows", "unknown", 1000)
    assert maker.tokenizer == digest_bytes(b"tokenizer")
    assert maker.teacher != Origin("other", ORIGIN.tokenizer, 1000).fingerprint("rows", None).teacher
    known = Origin(digest_bytes(b"teacher"), ORIGIN.tokenizer, 1000).fingerprint("rows", None)
    assert known.teacher == digest_bytes(b"teacher")


def test_optional_columns_of_plain_rows_are_kept_and_others_named(tmp_path: Path) -> None:
    extra = {
        "loss_mask": [[0, 1, 1], [1, 0]],
        "segment_ids": [[0, 0, 1], [2, 2]],
        "log_tail_mass": [[-4.0, -5.0], [-6.0]],
        "logsumexp": [[1.0, 2.0], [3.0]],
        "text": ["a", "b"],
    }
    pq.write_table(plain_table(**extra), tmp_path / "plain.parquet")
    done = import_rows(tmp_path / "plain.parquet", tmp_path / "plain.tkc", origin=ORIGIN)
    assert done.ignored == ("text",)
    with Shard.open(tmp_path / "plain.tkc") as shard:
        first = shard.read(0)
    assert first.loss_mask_L is not None and first.loss_mask_L.tolist() == [False, True, True]
    assert first.segment_ids_L is not None and first.segment_ids_L.tolist() == [0, 0, 1]
    assert first.rows.log_tail_mass_P.tolist() == [-4.0, -5.0]
    assert first.rows.logsumexp_P is not None and first.rows.logsumexp_P.tolist() == [1.0, 2.0]


def test_rows_without_numbers_are_absent(tmp_path: Path) -> None:
    values = [[[float("nan"), -2.0], []], [[float("inf"), -1.0]]]
    with imported(tmp_path, plain_table(token_ids=[[[1, 2], []], [[6, 7]]], logprobs=values)) as shard:
        assert [item.rows.absent_P.tolist() for item in shard] == [[True, True], [True]]
        assert all(np.isnan(item.rows.log_tail_mass_P).all() for item in shard)


def test_files_of_a_folder_are_read_by_their_numbers(tmp_path: Path) -> None:
    table, folder = plain_table(), tmp_path / "files"
    folder.mkdir()
    for number in (10, 9, 100):
        numbered = table.set_column(0, "input_ids", [[[number, 6, 7], [number, 9]]])
        pq.write_table(numbered, folder / f"d_{number}.parquet")
    import_rows(folder, tmp_path / "a.tkc", origin=ORIGIN)
    with Shard.open(tmp_path / "a.tkc") as shard:
        assert [int(item.input_ids_L[0]) for item in shard] == [9, 9, 10, 10, 100, 100]


def test_large_lists_are_lists(tmp_path: Path) -> None:
    polars.from_arrow(plain_table()).write_parquet(tmp_path / "polars.parquet")
    assert pa.types.is_large_list(pq.read_schema(tmp_path / "polars.parquet").field("input_ids").type)
    import_rows(tmp_path / "polars.parquet", tmp_path / "polars.tkc", origin=ORIGIN, profile="fp16")
    with imported(tmp_path, plain_table()):
        assert (tmp_path / "polars.tkc").read_bytes() == (tmp_path / "plain.tkc").read_bytes()


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"token_ids": [[[1, 2]], [[6, 7]]], "logprobs": [[[-1.0, -2.0]], [[-1.0, -2.0]]]}, InvalidRows, "need 2 rows"),
        ({"logprobs": [[[-0.1, -0.1], [-3.0, -0.5, -1.5]], [[-1.0, -2.0]]]}, InvalidRows, "add up to 1.8097: not log"),
        ({"logprobs": [[[-0.1], [-3.0, -0.5, -1.5]], [[-1.0, -2.0]]]}, InvalidRows, "lists of other lengths"),
        ({"token_ids": [[[1, -2], [3, 4, 5]], [[6, 7]]]}, InvalidRows, "an entry has the id -2"),
        ({"token_ids": [[[1, 1], [3, 4, 5]], [[6, 7]]]}, InvalidRows, "sequence 0: a row names a token twice"),
        ({"token_ids": [[[1, 2], [3, 4, 5]], [[1000, 7]]]}, InvalidRows, "sequence 1: support ids must lie in 0..999"),
        ({"token_ids": [[[1, 2**40], [3, 4, 5]], [[6, 7]]]}, SourceError, "not 32-bit integers"),
        ({"token_ids": [[[1, None], [3, 4, 5]], [[6, 7]]]}, SourceError, "'token_ids' has null entries"),
        ({"input_ids": [[5, 6, 7], None]}, SourceError, "record 1: 'input_ids' is null"),
        ({"input_ids": [["a", "b", "c"], ["d", "e"]]}, SourceError, "type list<element: string>, not list of integer"),
        ({"logprobs": [[1.0], [2.0]]}, SourceError, "not list of list of float"),
        ({"log_tail_mass": [[-4.0, None], [-6.0]]}, InvalidRows, "log_tail_mass holds nan"),
        ({"tail_token_ids": [[[9], [9]], [[9]]]}, SourceError, "need tail_token_ids, log_tail_mass and entropy"),
    ],
)
def test_rows_that_are_none_are_refused(
    tmp_path: Path, columns: dict[str, Any], error: type[FormatError], message: str
) -> None:
    with pytest.raises(error) as refused:
        imported(tmp_path, plain_table(**columns))
    assert message in str(refused.value)
    assert not (tmp_path / "plain.tkc").exists()


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    pq.write_table(plain_table().drop_columns("logprobs"), tmp_path / "short.parquet")
    pq.write_table(plain_table().slice(0, 0), tmp_path / "empty.parquet")
    pq.write_table(pa.table({"packed_indices": [1], "exact_values": [1], "coeffs": [1]}), tmp_path / "old.parquet")
    (tmp_path / "text.parquet").write_text("not Parquet at all")
    (tmp_path / "nothing").mkdir()
    for name, message in {
        "short.parquet": "need the columns",
        "empty.parquet": "holds no sequence",
        "old.parquet": "legacy layout: logits without a normaliser",
        "text.parquet": "cannot be read as Parquet",
        "nothing": "has no .parquet file",
        "none.parquet": "cannot read",
        ".": "has other columns than",
    }.items():
        with pytest.raises(SourceError, match=message):
            import_rows(tmp_path / name, tmp_path / "a.tkc", origin=ORIGIN)


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    pq.write_table(plain_table(), tmp_path / "a.parquet", write_page_checksum=True, compression="none")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[data.index(np.float64(-2.0).tobytes())] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(SourceError, match="cannot be read as Parquet"):
        import_rows(tmp_path / "a.parquet", tmp_path / "a.tkc", origin=ORIGIN)


def test_who_made_the_rows_must_be_clear(tmp_path: Path) -> None:
    pq.write_table(plain_table(), tmp_path / "plain.parquet")
    with pytest.raises(SourceError, match="do not say who made them"):
        import_rows(tmp_path / "plain.parquet", tmp_path / "a.tkc")
    with pytest.raises(SourceError, match="size of their vocabulary"):
        import_rows(tmp_path / "plain.parquet", tmp_path / "a.tkc", origin=Origin("t", ORIGIN.tokenizer))
    (tmp_path / "a.tkc").write_bytes(shard_bytes(sequence(0)))
    export(ShardSet(tmp_path / "a.tkc"), tmp_path / "own.parquet")
    with pytest.raises(SourceError, match="say themselves who made them"):
        import_rows(tmp_path / "own.parquet", tmp_path / "b.tkc", origin=ORIGIN)
    notes = pq.read_table(tmp_path / "own.parquet").replace_schema_metadata({"teachercache.metadata": "{}"})
    pq.write_table(notes, tmp_path / "forged.parquet")
    with pytest.raises(SourceError, match=r"teachercache\.metadata is malformed"):
        import_rows(tmp_path / "forged.parquet", tmp_path / "b.tkc")


@pytest.mark.parametrize(("shard_positions", "sequences"), [(5, [2]), (4, [1, 1]), (1, [1, 1])])
def test_a_shard_is_filled_to_its_limit(tmp_path: Path, shard_positions: int, sequences: list[int]) -> None:
    """The table has sequences of 3 and 2 tokens; a sequence above the limit is a shard of its own."""
    pq.write_table(plain_table(), tmp_path / "plain.parquet")
    import_rows(tmp_path / "plain.parquet", tmp_path / "cache", origin=ORIGIN, shard_positions=shard_positions)
    manifest = CacheDirectory(tmp_path / "cache").manifest()
    assert [shard.sequences for shard in manifest.shards] == sequences


def test_a_cache_is_never_written_over(tmp_path: Path) -> None:
    pq.write_table(plain_table(), tmp_path / "plain.parquet")
    import_rows(tmp_path / "plain.parquet", tmp_path / "cache", origin=ORIGIN)
    before = (tmp_path / "cache" / "manifest.json").read_bytes()
    with pytest.raises(TargetError, match="holds a cache already"):
        import_rows(tmp_path / "plain.parquet", tmp_path / "cache", origin=ORIGIN)
    assert (tmp_path / "cache" / "manifest.json").read_bytes() == before


def test_the_computed_tail_is_as_wrong_as_stated() -> None:
    """Rounded logprobs move the mass by no more than their own error, entry by entry."""
    rng = np.random.default_rng(0)
    logits = rng.gumbel(size=(400, 2000)) * rng.uniform(1, 8, (400, 1))
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    top = -np.sort(-logp, axis=1)[:, :100]
    truth = 1 - np.exp(top).sum(axis=1)
    np.testing.assert_allclose(np.exp(log_tail_mass(top)), truth, rtol=1e-6, atol=1e-12)
    bf16 = PROFILES["bf16"].decode(PROFILES["bf16"].encode(top))
    rounded = np.exp(log_tail_mass(bf16))
    bound = (np.exp(top) * -top).sum(axis=1) * 2.0**-8
    assert (np.abs(rounded - truth) <= bound).all()
    assert np.isneginf(log_tail_mass(bf16)[truth < 1e-4]).any()


def test_a_row_without_entries_has_no_tail_mass() -> None:
    assert np.isnan(log_tail_mass(np.array([[-np.inf, -np.inf]]))).all()


def test_ranking_keeps_the_order_of_equals() -> None:
    ids, logprobs = ranked(np.array([[7, 3, 9, 1]]), np.array([[-1.0, -0.5, -1.0, -np.inf]]))
    assert ids.tolist() == [[3, 7, 9, -1]]
    assert logprobs.tolist() == [[-0.5, -1.0, -1.0, -np.inf]]
