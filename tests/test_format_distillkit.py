"""DistillKit's data sets: decoded to what an encoder written here, number by number, put into them."""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from teachercache.format_spec import InvalidRows, Shard, digest_bytes
from teachercache.format_spec.distillkit import decode_ids, decode_logprobs
from teachercache.format_spec.distillkit_config import DistillKitConfig
from teachercache.format_spec.errors import SourceError
from teachercache.format_spec.importer import Imported, Origin, import_rows

VOCAB, K = 1000, 12
ORIGIN = Origin("some teacher", digest_bytes(b"tokenizer"))
BASE: dict[str, Any] = {"d": VOCAB, "k": K, "exact_k": 4, "residual_bins": [], "delta_encoding": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "all exact": {"exact_k": K, "exact_dtype": "float32"},
    "recommended": {"exact_dtype": "bfloat16", "polynomial_terms": [0, 1, 2, "sqrt"], "term_dtype": "float32"},
    "normalised": {"exact_dtype": "float16", "polynomial_terms": [0, 1, "exp"], "normalize_t": True},
    "delta": {"exact_dtype": "float64", "polynomial_terms": [0, 1], "delta_encoding": True},
    "half terms": {"polynomial_terms": [0, "sqrt"], "term_dtype": "bfloat16"},
    "no exact": {"exact_k": 0, "polynomial_terms": [0, 1, 2], "term_dtype": "float64"},
    "residuals": {
        "polynomial_terms": [0, 1],
        "residual_bins": [
            {"scale_dtype": "float16", "element_bits": 5, "num_elements": 3},
            {"scale_dtype": "float32", "element_bits": 1, "num_elements": 2},
        ],
    },
    "residuals alone": {"residual_bins": [{"scale_dtype": "bfloat16", "element_bits": 11, "num_elements": 8}]},
}
LETTERS = {"float16": "<e", "float32": "<f", "float64": "<d"}


def number(value: float, dtype: str) -> tuple[bytes, float]:
    """The bytes of a number in a dtype, and what they stand for."""
    if dtype != "bfloat16":
        data = struct.pack(LETTERS[dtype], value)
        return data, struct.unpack(LETTERS[dtype], data)[0]
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return struct.pack("<H", upper), struct.unpack("<f", struct.pack("<I", upper << 16))[0]


def packed(numbers: list[int], bits: int) -> bytes:
    """Integers of so many bits, the highest bit first, filled up to whole bytes."""
    text = "".join(f"{value:0{bits}b}" for value in numbers)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))


def encode(row: list[float], config: dict[str, Any]) -> tuple[bytes, list[float]]:
    """The bytes of a row, and the logprobs that they stand for."""
    settings = {
        "exact_dtype": "float32",
        "term_dtype": "float32",
        "polynomial_terms": [],
        "normalize_t": False,
    } | config
    if config["delta_encoding"]:
        row = [row[0]] + [b - a for a, b in pairwise(row)]
    exact_k = config["exact_k"]
    exact = [number(value, settings["exact_dtype"]) for value in row[:exact_k]]
    data, decoded = b"".join(item for item, _ in exact), [value for _, value in exact]
    rest = row[exact_k:]
    points = [t / (len(rest) - 1) if settings["normalize_t"] else float(t) for t in range(len(rest))]
    shapes = {"sqrt": math.sqrt, "exp": math.exp}
    matrix = [[shapes[i](t) if i in shapes else t**i for i in settings["polynomial_terms"]] for t in points]
    curve = [0.0] * len(rest)
    if settings["polynomial_terms"]:
        fitted = np.linalg.lstsq(np.array(matrix), np.array(rest), rcond=None)[0] if rest else []
        terms = [number(value, settings["term_dtype"]) for value in fitted]
        data += b"".join(item for item, _ in terms)
        # DistillKit computes the curve in this dtype
        rounded = [[number(x, settings["term_dtype"])[1] for x in line] for line in matrix]
        products = [[x * value for x, (_, value) in zip(line, terms, strict=True)] for line in rounded]
        sums = [sum(number(x, settings["term_dtype"])[1] for x in line) for line in products]
        curve = [number(x, settings["term_dtype"])[1] for x in sums]
    begin = 0
    for part in config["residual_bins"]:
        end, bits = begin + part["num_elements"], part["element_bits"]
        left = [value - fit for value, fit in zip(rest[begin:end], curve[begin:end], strict=True)]
        low, high = (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        item, scale = number(max(map(abs, left)) / max(-low, 1), part["scale_dtype"])
        steps = [min(max(round(value / scale), low), high) for value in left]
        data += item + packed([step - low for step in steps], bits)
        for i, step in enumerate(steps, begin):
            curve[i] += (2 * step - 1 if bits == 1 else step) * scale
        begin = end
    decoded += curve
    return data, list(np.cumsum(decoded)) if config["delta_encoding"] else decoded


def rows(count: int, seed: int = 0) -> tuple[list[list[int]], list[list[float]]]:
    """Token ids and logprobs of some rows, most probable first."""
    rng = np.random.default_rng(seed)
    logits = -np.sort(-rng.gumbel(size=(count, VOCAB)) * 2, axis=1)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    ids = np.stack([rng.permutation(VOCAB)[:K] for _ in range(count)])
    return ids.tolist(), logprobs[:, :K].tolist()


def octets(data: list[bytes]) -> np.ndarray:
    return np.array([list(item) for item in data], np.uint8).reshape(len(data), -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_decode_to_what_was_encoded(name: str) -> None:
    config = BASE | CONFIGS[name]
    _, logprobs = rows(30)
    encoded = [encode(row, config) for row in logprobs]
    decoded = decode_logprobs(octets([data for data, _ in encoded]), DistillKitConfig.from_json(config))
    np.testing.assert_allclose(decoded, [values for _, values in encoded], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [2, 3, 1000, 2**16, 2**16 + 1, 201_088])
def test_ids_decode_to_what_was_encoded(vocab_size: int) -> None:
    config = DistillKitConfig.from_json(BASE | {"d": vocab_size, "exact_k": K})
    bits = (vocab_size - 1).bit_length()
    ids = np.random.default_rng(1).integers(0, vocab_size, (20, K))
    decoded = decode_ids(octets([packed(row, bits) for row in ids.tolist()]), config)
    np.testing.assert_array_equal(decoded, ids)


def write_dataset(
    folder: Path, config: dict[str, Any], lengths: list[int], extra_rows: int = 0, **columns: Any
) -> None:
    """A data set as DistillKit writes it, one file a sequence."""
    folder.mkdir(exist_ok=True)
    (folder / "compression_config.yaml").write_text(yaml.safe_dump(config))
    for i, length in enumerate(lengths):
        ids, logprobs = rows(length - 1 + extra_rows, seed=i)
        values = [list(encode(row, config)[0]) for row in logprobs]
        indices = [list(packed(row, (config["d"] - 1).bit_length())) for row in ids]
        kinds = [("input_ids", pa.list_(pa.uint64()))]
        kinds += [(name, pa.list_(pa.list_(pa.uint8()))) for name in ("compressed_logprobs", "bytepacked_indices")]
        table = pa.table([[list(range(i, i + length))], values and [values], indices and [indices]], pa.schema(kinds))
        for name, value in columns.items():
            table = table.append_column(name, [value])
        pq.write_table(table, folder / f"data_{i}.parquet")


@pytest.mark.parametrize("extra_rows", [0, 1])
def test_a_data_set_becomes_a_shard(tmp_path: Path, extra_rows: int) -> None:
    """As captured, with a row for every token but the first; and as packed, with one more, which is left out."""
    config = BASE | CONFIGS["recommended"]
    lengths = [7, 4, 5] * 4
    write_dataset(tmp_path / "set", config, lengths, extra_rows, text=["left out"])
    done = import_rows(tmp_path / "set", tmp_path / "a.tkc", origin=ORIGIN, profile="fp16")
    assert done == Imported("distillkit", 12, ("text",))
    with Shard.open(tmp_path / "a.tkc") as shard:
        maker = shard.metadata.fingerprint
        assert (maker.vocab_size, maker.engine, maker.kernel) == (VOCAB, "import", "distillkit")
        for i, (item, length) in enumerate(zip(shard, lengths, strict=True)):
            assert item.input_ids_L.tolist() == list(range(i, i + length))
            ids, logprobs = rows(length - 1 + extra_rows, seed=i)
            for j, row in enumerate(logprobs[: length - 1]):
                values = np.minimum(encode(row, config)[1], 0.0)
                order = np.argsort(-values, kind="stable")
                np.testing.assert_allclose(item.rows.logprobs_PK[j], values[order], rtol=2.0**-10, atol=1e-5)
                assert sorted(item.rows.token_ids_PK[j].tolist()) == sorted(ids[j])
                assert item.rows.token_ids_PK[j, 0] == ids[j][order[0]]
                tail = max(1 - np.exp(values).sum(), 0)
                np.testing.assert_allclose(np.exp(item.rows.log_tail_mass_P[j]), tail, atol=1e-5)


def test_labels_become_the_loss_mask(tmp_path: Path) -> None:
    write_dataset(tmp_path, BASE | CONFIGS["all exact"], [4], labels=[[-100, -100, 2, 3]])
    import_rows(tmp_path, tmp_path / "a.tkc", origin=ORIGIN)
    with Shard.open(tmp_path / "a.tkc") as shard:
        mask = shard.read(0).loss_mask_L
    assert mask is not None and mask.tolist() == [False, False, True, True]


def test_the_config_of_a_run_will_do(tmp_path: Path) -> None:
    config = BASE | CONFIGS["delta"]
    write_dataset(tmp_path, config, [5])
    import_rows(tmp_path, tmp_path / "a.tkc", origin=ORIGIN)
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"model": "m", "teacher": {"logprob_compressor": config}}))
    (tmp_path / "compression_config.yaml").unlink()
    import_rows(tmp_path, tmp_path / "b.tkc", origin=ORIGIN, config=tmp_path / "run.yml")
    assert (tmp_path / "a.tkc").read_bytes() == (tmp_path / "b.tkc").read_bytes()
    with pytest.raises(SourceError, match="cannot read"):
        import_rows(tmp_path, tmp_path / "c.tkc", origin=ORIGIN)


def test_values_that_are_no_numbers_are_absent_rows_and_none_is_above_zero(tmp_path: Path) -> None:
    config = BASE | {"exact_k": 2, "k": 2, "exact_dtype": "float32"}
    values = [[0.25, -1.0], [math.nan, -1.0], [-0.5, -math.inf], [math.inf, 0.0]]
    kinds = pa.list_(pa.list_(pa.uint8()))
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2, 3, 4, 5]], pa.list_(pa.uint64())),
            "compressed_logprobs": pa.array([[list(struct.pack("<2f", *row)) for row in values]], kinds),
            "bytepacked_indices": pa.array([[list(packed([8, 9], 10))] * 4], kinds),
        }
    )
    pq.write_table(table, tmp_path / "data_0.parquet")
    (tmp_path / "compression_config.yaml").write_text(yaml.safe_dump(config))
    import_rows(tmp_path, tmp_path / "a.tkc", origin=ORIGIN)
    with Shard.open(tmp_path / "a.tkc") as shard:
        stored = shard.read(0).rows
    assert stored.absent_P.tolist() == [False, True, False, True]
    assert stored.logprobs_PK[0].tolist() == [0.0, -1.0]
    assert stored.token_ids_PK[2].tolist() == [8, -1]
    assert stored.log_tail_mass_P[0] == -np.inf


@pytest.mark.parametrize(
    ("change", "message"), [({"exact_k": 5}, "'compressed_logprobs' has rows of 24 bytes"), ({"d": 2000}, "bytepacked")]
)
def test_a_config_that_does_not_fit_the_rows_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = BASE | CONFIGS["recommended"]
    write_dataset(tmp_path, config, [5])
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(config | change))
    with pytest.raises(SourceError, match=message):
        import_rows(tmp_path, tmp_path / "a.tkc", origin=ORIGIN, config=tmp_path / "other.yaml")


def test_rows_that_do_not_go_with_the_tokens_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path, BASE | CONFIGS["recommended"], [5], extra_rows=2)
    with pytest.raises(InvalidRows, match=r"data_0\.parquet, record 0: 5 tokens have 6 rows of values"):
        import_rows(tmp_path, tmp_path / "a.tkc", origin=ORIGIN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 3}, "exact_k is 4, allowed are integers from 0 to 3"),
        ({"k": True}, "k is True"),
        ({"d": 1}, "d is 1"),
        ({"exact_dtype": "int8"}, "dtype 'int8'"),
        ({"delta_encoding": "no"}, "delta_encoding is 'no'"),
        ({"polynomial_terms": ["cosh"]}, "polynomial term 'cosh'"),
        ({"residual_bins": [{"scale_dtype": "float32", "element_bits": 65, "num_elements": 1}]}, "element_bits is 65"),
        ({"residual_bins": [{"scale_dtype": "float32", "element_bits": 1, "num_elements": 9}]}, "9 residuals for 8"),
        ({"residual_bins": [{"bits": 1}]}, "not a compression config"),
        ({"of_the_future": 1}, "not a compression config"),
    ],
)
def test_configs_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        DistillKitConfig.from_json(BASE | change)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.yaml", "a: ]", "is not YAML"),
        ("a.yaml", "text", "not a compression config"),
        ("a.yaml", "k: 1", "not a compression config"),
    ],
)
def test_files_that_are_no_config_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=message):
        DistillKitConfig.load(tmp_path / name)
