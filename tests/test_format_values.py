"""Requests, manifests, canonical JSON, digests, uniforms and data sets: golden values and bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from format_samples import fingerprint, sequence
from hypothesis import given
from hypothesis import strategies as st

from teachercache.format_spec import (
    CacheRequest,
    Code,
    Dataset,
    DatasetError,
    Example,
    FormatError,
    Generation,
    Manifest,
    ManifestError,
    QualityTally,
    RequestError,
    ShardDescriptor,
    Submission,
    canonical_json,
    content_key,
    digest_bytes,
    parse_canonical,
    read_jsonl,
    tail_uniforms,
    write_dataset,
)

DATA = digest_bytes(b"data")


def request(**changes: object) -> CacheRequest:
    fields: dict[str, object] = {
        "teacher": fingerprint().teacher,
        "data": DATA,
        "engine": "transformers",
        "dtype": "float32",
        "head_dtype": "float32",
        "k": 16,
        "min_prob": "0",
        "tail_samples": 16,
        "seed": 0,
        "profile": "bf16",
        "shard_positions": 262144,
    }
    return CacheRequest(**(fields | changes))  # type: ignore[arg-type]


def test_golden_request_ids() -> None:
    """An id that changes makes every stored cache unreachable: these never change for spec_version 1."""
    assert request().canonical() == (
        b'{"data":"sha256:3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7","dtype":"float32",'
        b'"engine":"transformers","head_dtype":"float32","k":16,"min_prob":"0","profile":"bf16","seed":0,'
        b'"shard_positions":262144,"spec_version":"1","tail_samples":16,'
        b'"teacher":"sha256:1057a9604e04b274da5a4de0c8f4b4868d9b230989f8c8c6a28221143cc5a755"}'
    )
    assert request().id == "8ed0566009e0f48557cabd13ea11736f05f669a4904cf8f674170d14cbf49ad3"
    assert (
        request(k=100, tail_samples=0, seed=2**53 - 1).id
        == "009287f004d2a3666f5cfa941b314093a1f9337691a8cb44ba9f5e7a11a551e6"
    )


def test_submission_resolves_to_the_same_request_however_it_is_written() -> None:
    served = {"teacher": fingerprint().teacher, "vocab_size": 1000, "engine": "transformers", "dtype": "float32"}
    auto = Submission("name", DATA).resolve(**served, head_dtype="float32", draws_tail_samples=True)
    full = Submission(served["teacher"], DATA, 16, "0", 16, 0, "bf16", 262144, "transformers", "float32")
    assert auto == full.resolve(**served, head_dtype="float32", draws_tail_samples=True) == request()
    plain = Submission("name", DATA).resolve(**served, head_dtype="float32", draws_tail_samples=False)
    assert plain.tail_samples == 0


def test_generation_has_one_form() -> None:
    """A request that only scores has no key of it, or every id would have changed."""
    asked = request(generate={"max_tokens": 64, "temperature": 0.70, "top_p": "1.0"})
    assert asked.to_json()["generate"] == {"max_tokens": 64, "temperature": "0.7", "top_p": "1"}
    assert asked.id == request(generate=Generation(64, "0.7")).id != request(generate=Generation(64)).id
    assert CacheRequest.from_json(json.loads(asked.canonical())) == asked
    assert "generate" not in request().to_json()
    for wrong in (None, {"max_tokens": 64}, {"max_tokens": 64, "temperature": "0.70", "top_p": "1"}):
        with pytest.raises(RequestError, match="canonical form"):
            CacheRequest.from_json(request().to_json() | {"generate": wrong})


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        ({}, "lacks max_tokens"),
        ({"max_tokens": 0}, "from 1 to 1048576, not 0"),
        ({"max_tokens": True}, "not True"),
        ({"max_tokens": 9, "n": 2}, r"unknown keys \['n'\]"),
        ({"max_tokens": 9, "temperature": -1}, "temperature must be a decimal from 0 to 100"),
        ({"max_tokens": 9, "temperature": "100.5"}, "temperature must be a decimal from 0 to 100"),
        ({"max_tokens": 9, "top_p": "1e-1"}, "top_p must be a decimal above 0 to 1"),
        ({"max_tokens": 9, "top_p": 0}, "top_p must be a decimal above 0 to 1"),
        ({"max_tokens": 9, "top_p": 1.5}, "top_p must be a decimal above 0 to 1"),
        (5, "not int"),
    ],
)
def test_generation_that_cannot_be_is_refused(generate: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Submission("t", DATA, generate=generate)  # type: ignore[arg-type]


def test_an_engine_that_cannot_generate_is_not_asked_to() -> None:
    served = {"teacher": fingerprint().teacher, "vocab_size": 1000, "engine": "openai", "dtype": "float32"}
    asked = Submission("name", DATA, generate=Generation(9))
    with pytest.raises(RequestError, match="cannot generate"):
        asked.resolve(**served, head_dtype="unknown", draws_tail_samples=False, generates=False)


FREE_FIELDS = {field.name for field in dataclasses.fields(CacheRequest)} - {"spec_version"}


@pytest.mark.parametrize("name", sorted(FREE_FIELDS))
def test_every_field_changes_the_id(name: str) -> None:
    value = getattr(request(), name)
    other = (
        "m5"
        if name == "profile"
        else "0.5"
        if name == "min_prob"
        else Generation(5)
        if name == "generate"
        else value + 1
        if isinstance(value, int)
        else digest_bytes(b"other")
        if ":" in value
        else "other"
    )
    assert request(**{name: other}).id != request().id


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"k": 0}, Code.K_OUT_OF_RANGE),
        ({"k": 1001}, Code.K_OUT_OF_RANGE),
        ({"k": 4097}, Code.K_OUT_OF_RANGE),
        ({"k": True}, Code.K_OUT_OF_RANGE),
        ({"k": 1.5}, Code.K_OUT_OF_RANGE),
        ({"tail_samples": -1}, Code.INVALID_REQUEST),
        ({"tail_samples": "many"}, Code.INVALID_REQUEST),
        ({"seed": 2**53}, Code.INVALID_REQUEST),
        ({"data": "file.parquet"}, Code.INVALID_REQUEST),
        ({"teacher": ""}, Code.INVALID_REQUEST),
        ({"profile": "m4"}, Code.INVALID_REQUEST),
        ({"min_prob": "1e-3"}, Code.INVALID_REQUEST),
        ({"min_prob": 1}, Code.INVALID_REQUEST),
        ({"shard_positions": 0}, Code.INVALID_REQUEST),
        ({"engine": "vllm"}, Code.INVALID_REQUEST),
        ({"surprise": 1}, Code.INVALID_REQUEST),
    ],
)
def test_bad_submissions_are_refused_by_code(change: dict[str, object], code: Code) -> None:
    with pytest.raises(RequestError) as caught:
        Submission.from_json({"teacher": "t", "data": DATA} | change).resolve(
            teacher=fingerprint().teacher,
            vocab_size=1000,
            engine="transformers",
            dtype="float32",
            head_dtype="float32",
            draws_tail_samples=True,
        )
    assert caught.value.code is code
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("0", "0"),
        ("0.0", "0"),
        ("0.001", "0.001"),
        ("0.0010", "0.001"),
        ("0.50", "0.5"),
        (0, "0"),
        (0.0, "0"),
        (0.1, "0.1"),
        (1e-3, "0.001"),
        (1e-7, "0.0000001"),
        (np.float64(0.25), "0.25"),
        (0.1 + 0.2, "0.30000000000000004"),
        ("0." + "0" * 31 + "1", "0." + "0" * 31 + "1"),
    ],
)
def test_a_least_probability_has_one_text(given: str | float, canonical: str) -> None:
    submission = Submission("t", DATA, min_prob=given)
    assert submission.min_prob == canonical
    assert Submission.from_json(submission.to_json()) == submission
    assert float(canonical) == float(given)


BAD_PROBABILITIES = [
    "1",
    "1.0",
    "-0.1",
    "-0",
    "+0.1",
    "1e-3",
    "0.",
    ".5",
    "00.1",
    "0,1",
    "0.1 ",
    " 0.1",
    "0.1\n",
    "NaN",
]
BAD_PROBABILITIES += ["inf", "", "0x1", "0.٣", "0." + "1" * 33, "0._1"]


@pytest.mark.parametrize(
    "value",
    [*BAD_PROBABILITIES, 1, 1.0, 2.5, -0.1, -0.0, float("nan"), float("inf"), 1e-33, True, False, None, ["0.1"]],
)
def test_what_is_no_least_probability_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match="min_prob must be a decimal from 0 to below 1") as caught:
        Submission("t", DATA, min_prob=value)  # type: ignore[arg-type]
    assert caught.value.code is Code.INVALID_REQUEST
    with pytest.raises(RequestError):
        request(min_prob=value)


@pytest.mark.parametrize("value", ["0.0", "0.10", 0.5, 0])
def test_a_stored_request_holds_the_canonical_text_alone(value: object) -> None:
    with pytest.raises(RequestError, match=r"is not in its canonical form|must be a decimal"):
        request(min_prob=value)


def test_tail_samples_from_an_engine_that_cannot_draw_them_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot draw tail samples") as caught:
        Submission("t", DATA, tail_samples=4).resolve(
            teacher=fingerprint().teacher,
            vocab_size=1000,
            engine="plain",
            dtype="x",
            head_dtype="x",
            draws_tail_samples=False,
        )
    assert caught.value.code is Code.TAIL_SAMPLES_UNAVAILABLE


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(max_codepoint=126)), inner),
    max_leaves=20,
)


@given(json_values)
def test_canonical_json_round_trips(value: object) -> None:
    data = canonical_json(value)
    assert parse_canonical(data) == value == json.loads(data)


def test_canonical_json_is_rfc_8785() -> None:
    value = {"b": '\u20ac$\x0f\nA\'B"\\\\"/', "a": [True, None, 56]}
    assert canonical_json(value) == b'{"a":[true,null,56],"b":"\xe2\x82\xac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'


@pytest.mark.parametrize("value", [1.0, float("nan"), {"\u00e9": 1}, {1: 2}, 2**53, "\ud800", b"x", {"a": {2}}])
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    with pytest.raises(FormatError):
        canonical_json(value)


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": 1}', b'{"b":1,"a":2}', b"[1.0]", b'{"a":1,"a":1}', b"[" * 100_000])
def test_json_that_is_not_canonical_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_canonical(data)


def test_golden_uniforms() -> None:
    """The definition is published (SPEC 5.9): these numbers never change."""
    key = content_key([1, 2, 3])
    assert key.hex() == "4636993d3e1da4e9d6b8f87b79e8f7c6d018580d52661950eabc3845c5897a4d"
    uniforms = tail_uniforms(0, key, 5)
    assert uniforms.dtype == np.float64
    assert [int(u * 2**33) for u in uniforms] == [3088602711, 5474468263, 12641691, 8427323267, 6979261255]
    np.testing.assert_array_equal(tail_uniforms(0, key, 3), uniforms[:3])
    assert not np.array_equal(tail_uniforms(1, key, 5), uniforms)
    many = tail_uniforms(2**53 - 1, key, 100_000)
    assert many.min() > 0.0
    assert ((many + 15) / 16).max() < 1.0
    assert abs(many.mean() - 0.5) < 0.005


def manifest(complete: bool = True) -> Manifest:
    tally = QualityTally()
    for seed in range(3):
        tally.add(sequence(seed).rows)
    shards = tuple(ShardDescriptor(digest_bytes(bytes([i])), 100, 2 * i, 2, 40) for i in range(3 if complete else 2))
    return Manifest(request(), fingerprint(), "tiny", 6, complete, shards, tally.quality())


def test_manifest_round_trips_and_adds_up() -> None:
    for complete in (True, False):
        data = manifest(complete).to_bytes()
        again = Manifest.from_bytes(data)
        assert again == manifest(complete)
        assert again.to_bytes() == data
    assert manifest().num_positions == 120
    assert manifest().num_bytes == 300
    assert sum(manifest().quality.support_mass_histogram) == manifest().quality.rows - manifest().quality.absent_rows


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"format_version": "0.1"},
        {"totals": {"bytes": 1, "positions": 120, "shards": 3}},
        {"request_id": "0" * 64},
        {"complete": False, "sequences": 5},
        {"sequences": 7},
        {"shards": []},
        {"surprise": 1},
        {"quality": {}},
    ],
)
def test_manifests_that_do_not_add_up_are_refused(change: dict[str, object]) -> None:
    value = json.loads(manifest().to_bytes()) | change
    with pytest.raises(ManifestError):
        Manifest.from_bytes(canonical_json(value))
    with pytest.raises(ManifestError):
        Manifest.from_bytes(b"\x00not json")


def test_tallies_add_up_over_shards() -> None:
    whole, parts = QualityTally(), QualityTally()
    for seed in range(4):
        part = QualityTally()
        for tally in (whole, part):
            tally.add(sequence(seed).rows)
        parts.merge(json.loads(json.dumps(part.to_json())))
    assert parts.quality() == whole.quality()


def test_datasets_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    examples = [
        Example(input_ids=rng.integers(0, 9, n), loss_mask=(rng.random(n) < 0.5) if n % 2 else None)
        for n in rng.integers(2, 30, 3000)
    ]
    path = tmp_path / "a.parquet"
    assert write_dataset(path, examples) == 3000
    first = path.read_bytes()
    write_dataset(path, examples)
    assert path.read_bytes() == first
    with Dataset(path) as dataset:
        assert (dataset.kind, dataset.num_sequences) == ("input_ids", 3000)
        for start, count in ((0, 3000), (1000, 100), (2047, 2), (2999, 1)):
            read = list(dataset.read(start, count))
            assert len(read) == count
            for got, want in zip(read, examples[start : start + count], strict=True):
                np.testing.assert_array_equal(got.input_ids, want.input_ids)
                np.testing.assert_array_equal(got.loss_mask, want.loss_mask)


def test_jsonl_becomes_a_dataset(tmp_path: Path) -> None:
    for i, lines in enumerate(
        [
            ['{"text": "a"}', "", '{"text": "b", "id": 3}'],
            ['{"messages": [{"role": "user", "content": "hi"}]}'] * 2,
            ['{"input_ids": [1, 2], "loss_mask": [0, 1]}', '{"input_ids": [3, 4]}'],
        ]
    ):
        source, target = tmp_path / "x.jsonl", tmp_path / f"{i}.parquet"
        source.write_text("\n".join(lines))
        assert write_dataset(target, read_jsonl(source)) == 2
        with Dataset(target) as dataset:
            assert len(list(dataset)) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 needs exactly one of the keys"),
        ('{"text": "a", "input_ids": [1]}', "line 2 needs exactly one of the keys"),
        ('{"text": 3}', "line 2: 'text' has the wrong shape"),
        ('{"input_ids": [1, "b"]}', "line 2: 'input_ids' has the wrong shape"),
        ('{"input_ids": [1, 99999999999]}', "line 2: 'input_ids' has the wrong shape"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "line 2: 'loss_mask' must hold one boolean a token"),
        ('{"messages": [{"role": "user"}]}', "line 2: 'messages' has the wrong shape"),
        ('{"input_ids": [1, 2]}', "every example must have 'text'"),
    ],
)
def test_bad_jsonl_names_its_line(tmp_path: Path, line: str, problem: str) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(DatasetError, match=problem):
        write_dataset(tmp_path / "x.parquet", read_jsonl(source))


def test_files_that_are_no_dataset_are_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    for data in (b"", b"PAR1PAR1", b"{}", b"PAR1" + bytes(100) + b"PAR1"):
        path.write_bytes(data)
        with pytest.raises(DatasetError, match="not a Parquet file"):
            Dataset(path)
    for columns, problem in [
        ({"text": pa.array([], pa.string())}, "empty"),
        ({"other": [1]}, "exactly one"),
        ({"text": ["a"], "input_ids": [[1]]}, "exactly one"),
        ({"text": [1]}, "type int64"),
        ({"input_ids": [1]}, "type int64"),
        ({"input_ids": [[1.5]]}, "type list"),
        ({"messages": [[{"role": "a"}]]}, "type list"),
        ({"text": ["a"], "loss_mask": [[True]]}, "unknown columns"),
        ({"input_ids": [[1, 2]], "loss_mask": [1]}, "loss_mask"),
    ]:
        pq.write_table(pa.table(columns), path)
        with pytest.raises(DatasetError, match=problem):
            Dataset(path)
    for columns, problem in [
        ({"text": ["a", None]}, "sequence 1 is null"),
        ({"input_ids": [[1], [2, None]]}, "sequence 1 has null"),
        ({"input_ids": [[1, 2]], "loss_mask": [[True]]}, "loss mask of 1"),
    ]:
        pq.write_table(pa.table(columns), path)
        with Dataset(path) as dataset, pytest.raises(DatasetError, match=problem):
            list(dataset)


def test_damaged_parquet_is_refused_not_misread(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    examples = [Example(input_ids=np.arange(50) % 7) for _ in range(50)]
    write_dataset(path, examples)
    data = path.read_bytes()
    for i in range(4, len(data) - 200, 37):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :])
        try:
            with Dataset(path) as dataset:
                read = list(dataset)
        except DatasetError:
            continue
        for got, want in zip(read, examples, strict=True):
            np.testing.assert_array_equal(got.input_ids, want.input_ids)


def test_wire_codes_are_unique_and_read_back() -> None:
    assert len({code.wire for code in Code}) == len(Code)
    assert all(Code.from_wire(code.wire) is code for code in Code)
    assert Code.from_wire("from_the_future") is Code.INTERNAL


def test_spec_names_every_error_class_and_limit() -> None:
    import teachercache.format_spec as package
    from teachercache.format_spec import ShardError, constants

    text = (Path(package.__file__).parent / "SPEC.md").read_text()
    tops = ShardError.__subclasses__()
    for error in [*tops, *(child for top in tops for child in top.__subclasses__())]:
        assert f"**{error.__name__}**" in text, error
    for name, value in vars(constants).items():
        if name.startswith("MAX_"):
            assert f"{value:,}" in text, name
    for magic in (constants.HEADER_MAGIC, constants.TRAILER_MAGIC):
        assert f"`{magic.decode()}`" in text


def test_every_clause_that_the_code_names_stands_in_the_text() -> None:
    import re

    import teachercache.format_spec as package

    folder = Path(package.__file__).parent
    text = (folder / "SPEC.md").read_text()
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    clauses = set(re.findall(r"SPEC (\d+\.\d+)", code))
    assert len(clauses) > 15
    assert {clause for clause in clauses if f"**{clause}**" not in text} == set()
