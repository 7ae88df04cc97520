"""The transformers engine against a direct forward pass: tiny random teachers, and the real small one."""

from __future__ import annotations

import functools
import json
import pydoc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_reference import assert_rows_match, chi_square, gap_near, plain_row, save_tiny
from safetensors.torch import load_file, save_file

from teachercache.format_spec import Code, Example, Rows, content_key, tail_uniforms
from teachercache.service.engines import InvalidSetting, UnknownEngine, UnscorableSequence, load_engine
from teachercache.service.engines import transformers as engine_module
from teachercache.service.engines.tokenizer import Tokenizer
from teachercache.service.engines.transformers import TransformersEngine
from teachercache.service.errors import UnsupportedTeacher
from teachercache.service.plan import token_ids

SEED = 11
KINDS = ["llama", "gpt2", "softcapped", "scaled"]
DIGEST = "sha256:" + "0" * 64
COLUMNS = ("token_ids_PK", "logprobs_PK", "log_tail_mass_P", "logsumexp_P", "entropy_P", "tail_token_ids_PN")


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_tiny(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def tiny(tiny_dirs: dict[str, Path]) -> TransformersEngine:
    return TransformersEngine(tiny_dirs["llama"], device="cpu")


@pytest.fixture(scope="module")
def real(teacher_dir: Path) -> TransformersEngine:
    return TransformersEngine(teacher_dir, device="cpu")


@pytest.fixture(scope="module")
def real_ids(teacher_dir: Path) -> np.ndarray:
    """250 tokens of Python's own documentation."""
    return token_ids(Tokenizer(teacher_dir).encode(Example(text=pydoc.plain(pydoc.render_doc(json)))))[:250]


def sequences(lengths: list[int], vocab_size: int = 97) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


def uniforms(ids: np.ndarray) -> np.ndarray:
    return tail_uniforms(SEED, content_key(ids), len(ids) - 1)


@functools.cache
def direct_model(path: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def whole_logits(path: Path, ids: np.ndarray) -> torch.Tensor:
    """The logits of each row by the plainest call of the model: one sequence, no padding."""
    with torch.no_grad():
        logits_BLV: torch.Tensor = direct_model(path, torch.float32)(
            torch.from_numpy(ids.astype(np.int64))[None]
        ).logits
    return logits_BLV[0, :-1]


def scored(
    engine: TransformersEngine, given: list[np.ndarray], k: int = 5, tail_samples: int = 4, min_prob: float = 0.0
) -> list[Rows]:
    """Score and return the rows in the order given, each exactly once."""
    pairs = list(engine.score(given, k=k, tail_samples=tail_samples, seed=SEED, min_prob=min_prob))
    assert sorted(index for index, _ in pairs) == list(range(len(given)))
    return [rows for _, rows in sorted(pairs, key=lambda pair: pair[0])]


def assert_bit_equal(one: Rows, other: Rows) -> None:
    for name in COLUMNS:
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name


def assert_close(one: Rows, other: Rows) -> None:
    for name in ("logprobs_PK", "log_tail_mass_P", "logsumexp_P", "entropy_P"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_a_direct_forward_pass(kind: str, tiny_dirs: dict[str, Path]) -> None:
    engine = TransformersEngine(tiny_dirs[kind], device="cpu", max_batch_tokens=80)
    given = sequences([30, 2, 64, 9, 30, 17, 3])
    for ids, rows in zip(given, scored(engine, given), strict=True):
        assert len(rows) == len(ids) - 1
        assert_rows_match(rows, whole_logits(tiny_dirs[kind], ids), uniforms(ids))


@pytest.mark.parametrize("kind", ["llama", "scaled"])
def test_improbable_entries_are_in_the_tail_before_it_is_drawn_from(kind: str, tiny_dirs: dict[str, Path]) -> None:
    engine = TransformersEngine(tiny_dirs[kind], device="cpu", max_batch_tokens=80)
    given = sequences([30, 2, 64, 9])
    logits = [whole_logits(tiny_dirs[kind], ids) for ids in given]
    min_prob = gap_near(0.01, torch.cat(logits))
    kept = []
    for ids, rows, logits_PV in zip(given, scored(engine, given, k=12, min_prob=min_prob), logits, strict=True):
        assert_rows_match(rows, logits_PV, uniforms(ids), min_prob=min_prob)
        kept += (rows.token_ids_PK >= 0).sum(1).tolist()
    assert len(set(kept)) > 4


@pytest.mark.parametrize(
    ("kind", "head"), [("llama", "apart"), ("gpt2", "apart"), ("softcapped", "apart"), ("scaled", "whole")]
)
def test_a_head_runs_apart_where_that_gives_the_models_logits(kind: str, head: str, tiny_dirs: dict[str, Path]) -> None:
    fingerprint = TransformersEngine(tiny_dirs[kind], dtype="bfloat16", device="cpu").fingerprint(DIGEST, DIGEST)
    assert f"head={head}" in fingerprint.kernel.split()
    assert fingerprint.head_dtype == ("float32" if head == "apart" else "bfloat16")


def test_the_fingerprint_says_what_computes(tiny: TransformersEngine) -> None:
    fingerprint = tiny.fingerprint("sha256:" + "1" * 64, "sha256:" + "2" * 64)
    assert (fingerprint.teacher[-1], fingerprint.tokenizer[-1]) == ("1", "2")
    assert (fingerprint.engine, fingerprint.vocab_size) == ("transformers", 211)
    assert (fingerprint.dtype, fingerprint.head_dtype, fingerprint.device) == ("float32", "float32", "cpu")
    assert fingerprint.software == {"torch": torch.__version__, "transformers": transformers.__version__}
    assert fingerprint.kernel == "attention=sdpa head=apart matmul=highest batching=1/2048"


def test_a_16_bit_teacher_has_a_float32_head(tiny_dirs: dict[str, Path]) -> None:
    (ids,) = sequences([40])
    (rows,) = scored(TransformersEngine(tiny_dirs["llama"], dtype="bfloat16", device="cpu"), [ids])
    model = direct_model(tiny_dirs["llama"], torch.bfloat16)
    with torch.no_grad():
        hidden = model.base_model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0, :-1]
        logits = hidden.float() @ model.lm_head.weight.float().T
    assert_rows_match(rows, logits, uniforms(ids))


@pytest.mark.parametrize("kind", ["llama", "scaled"])
def test_batches_and_blocks_hardly_change_rows(
    kind: str, tiny_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sequences([5, 40, 41, 2, 33, 40])
    at_once = scored(TransformersEngine(tiny_dirs[kind], device="cpu"), given)
    one_by_one = scored(TransformersEngine(tiny_dirs[kind], device="cpu", max_batch_tokens=1), given)
    monkeypatch.setattr(engine_module, "LOGITS_BYTES", 4 * 211 * 3)
    in_blocks = scored(TransformersEngine(tiny_dirs[kind], device="cpu"), given)
    for rows, other, third in zip(at_once, one_by_one, in_blocks, strict=True):
        assert_close(rows, other)
        assert_close(rows, third)


def test_a_long_sequence_never_has_all_its_logits_at_once(
    tiny: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LOGITS_BYTES", 4 * 211 * 10)
    seen: list[tuple[int, ...]] = []
    capture = engine_module.capture
    monkeypatch.setattr(engine_module, "capture", lambda z, **rest: seen.append(tuple(z.shape)) or capture(z, **rest))
    assert len(scored(tiny, sequences([64]))[0]) == 63
    assert seen == [(10, 211)] * 6 + [(3, 211)]


def test_whole_logits_bound_the_batches(tiny_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LOGITS_BYTES", 4 * 211 * 40)
    seen: list[int] = []
    pad_batch = engine_module.pad_batch
    monkeypatch.setattr(engine_module, "pad_batch", lambda batch: seen.append(len(batch)) or pad_batch(batch))
    scored(TransformersEngine(tiny_dirs["scaled"], device="cpu"), sequences([20, 20, 20, 64]))
    assert seen == [2, 1, 1]


def test_the_same_list_gives_the_same_bits(tiny_dirs: dict[str, Path], tiny: TransformersEngine) -> None:
    given = sequences([20, 7, 20, 64, 33, 2])
    again = TransformersEngine(tiny_dirs["llama"], device="cpu")
    first, second = (list(e.score(given, k=5, tail_samples=4, seed=SEED)) for e in (tiny, again))
    assert [index for index, _ in first] == [index for index, _ in second] == [5, 1, 0, 2, 4, 3]
    for (_, rows), (_, other) in zip(first, second, strict=True):
        assert_bit_equal(rows, other)


def test_draws_depend_on_the_seed_and_the_content_alone(tiny: TransformersEngine) -> None:
    given = sequences([30, 30])
    forwards, backwards = scored(tiny, given), scored(tiny, given[::-1])[::-1]
    for rows, other in zip(forwards, backwards, strict=True):
        assert rows.tail_token_ids_PN is not None
        assert other.tail_token_ids_PN is not None
        assert (rows.tail_token_ids_PN == other.tail_token_ids_PN).all(1).mean() >= 0.9
    (other_seed,) = (rows for _, rows in tiny.score(given[:1], k=5, tail_samples=4, seed=SEED + 1))
    assert other_seed.tail_token_ids_PN is not None
    assert forwards[0].tail_token_ids_PN is not None
    assert (other_seed.tail_token_ids_PN != forwards[0].tail_token_ids_PN).any()
    assert_close(other_seed, forwards[0])


def test_the_shortest_sequence_and_the_largest_k(tiny: TransformersEngine) -> None:
    given = sequences([2, 3])
    for ids, rows in zip(given, scored(tiny, given, k=211, tail_samples=1), strict=True):
        assert rows.token_ids_PK.shape == (len(ids) - 1, 211)
        assert (np.sort(rows.token_ids_PK) == np.arange(211)).all()
        assert (rows.tail_token_ids_PN == -1).all()
    assert scored(tiny, given, tail_samples=0)[0].tail_token_ids_PN is None


def test_no_sequences_give_no_rows(tiny: TransformersEngine) -> None:
    assert list(tiny.score([], k=5, tail_samples=4, seed=SEED)) == []


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (np.array([4]), Code.SEQUENCE_TOO_SHORT),
        (np.zeros((2, 2), dtype=np.int32), Code.SEQUENCE_TOO_SHORT),
        (np.zeros(65, dtype=np.int32), Code.SEQUENCE_TOO_LONG),
        (np.array([3, 211]), Code.TOKEN_OUT_OF_VOCABULARY),
        (np.array([-1, 3]), Code.TOKEN_OUT_OF_VOCABULARY),
    ],
)
def test_a_sequence_that_cannot_be_scored_is_named_before_any_work(
    bad: np.ndarray, code: Code, tiny: TransformersEngine
) -> None:
    with pytest.raises(UnscorableSequence, match="sequence 1 ") as caught:
        tiny.score([*sequences([4]), bad], k=5, tail_samples=4, seed=SEED)
    assert (caught.value.code, caught.value.index) == (code, 1)


@pytest.mark.parametrize(
    ("k", "tail_samples", "min_prob"),
    [(0, 0, 0.0), (212, 0, 0.0), (5, -1, 0.0), (5, 0, -0.1), (5, 0, 1.1), (5, 0, float("nan"))],
)
def test_impossible_numbers_are_refused(k: int, tail_samples: int, min_prob: float, tiny: TransformersEngine) -> None:
    with pytest.raises(InvalidSetting):
        tiny.score(sequences([4]), k=k, tail_samples=tail_samples, seed=SEED, min_prob=min_prob)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"device": "tpu"}, {"device": "mps"}, {"max_batch_tokens": 0}])
def test_impossible_settings_are_refused(options: dict[str, Any], tiny_dirs: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting):
        TransformersEngine(tiny_dirs["llama"], **options)


@pytest.mark.parametrize("beside", [None, "other.safetensors"])
def test_pickled_weights_are_refused(beside: str | None, tiny_dirs: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(tiny_dirs["llama"] / "model.safetensors")
    shutil.copy(tiny_dirs["llama"] / "config.json", tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    if beside is not None:
        save_file(weights, tmp_path / beside, metadata={"format": "pt"})
    with pytest.raises(UnsupportedTeacher, match="cannot load the teacher" if beside else "pickled weights are not"):
        load_engine("transformers", tmp_path)


def test_missing_weights_are_refused(tiny_dirs: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(tiny_dirs["llama"] / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    shutil.copy(tiny_dirs["llama"] / "config.json", tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedTeacher, match=r"lacks 1 of its weights, model\.layers\.1\.mlp\.up_proj\.weight"):
        load_engine("transformers", tmp_path)


def test_damaged_weights_are_refused(tiny_dirs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_dirs["llama"], tmp_path, dirs_exist_ok=True)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UnsupportedTeacher, match="cannot load the teacher"):
        load_engine("transformers", tmp_path)


def test_code_in_the_teachers_folder_is_never_run(tiny_dirs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_dirs["llama"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UnsupportedTeacher):
        load_engine("transformers", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.4, is_decoder=False,
    )  # fmt: skip
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTeacher, match="not causal"):
        load_engine("transformers", tmp_path)


def test_an_unknown_engine_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownEngine, match=r"'tgi'; known: .*'transformers'"):
        load_engine("tgi", tmp_path)


def test_the_package_needs_no_torch_and_names_what_the_engine_lacks() -> None:
    script = (
        "import sys\n"
        "from teachercache.service import engines\n"
        "from teachercache.service.errors import MissingExtra\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "sys.modules['torch'] = None\n"
        "try:\n"
        "    engines.load_engine('transformers', 'anywhere')\n"
        "except MissingExtra as error:\n"
        "    print(error.code.wire, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("missing_extra engine 'transformers' needs torch")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_rows_of_the_cpu(kind: str, dtype: str, tiny_dirs: dict[str, Path]) -> None:
    given = sequences([30, 2, 64, 9, 17])
    engines = [TransformersEngine(tiny_dirs[kind], dtype=dtype, device=device) for device in ("cuda", "cpu", "cuda")]
    on_gpu, on_cpu, again = (scored(engine, given) for engine in engines)
    atol = 1e-3 if dtype == "float32" else 0.3
    for rows, other, third in zip(on_gpu, on_cpu, again, strict=True):
        np.testing.assert_allclose(rows.logsumexp_P, other.logsumexp_P, atol=atol, rtol=0)
        np.testing.assert_allclose(rows.logprobs_PK[:, 0], other.logprobs_PK[:, 0], atol=atol, rtol=0)
        assert_bit_equal(rows, third)


def test_the_real_teachers_rows_match_a_direct_forward_pass(
    real: TransformersEngine, real_ids: np.ndarray, teacher_dir: Path
) -> None:
    given = [real_ids[:120], real_ids[120:150], real_ids[150:250]]
    tail_counts, tail_expected = np.zeros(real.vocab_size), np.zeros(real.vocab_size)
    for ids, rows in zip(given, scored(real, given, k=16, tail_samples=16), strict=True):
        logits_PV = whole_logits(teacher_dir, ids)
        assert_rows_match(rows, logits_PV, uniforms(ids))
        assert rows.tail_token_ids_PN is not None
        tail_counts += np.bincount(rows.tail_token_ids_PN.ravel(), minlength=real.vocab_size)
        for logits, u in zip(logits_PV.numpy(), uniforms(ids), strict=True):
            tail_expected += 16 * plain_row(logits, 16, 16, u).tail
    statistic, limit = chi_square(tail_counts, tail_expected)
    assert statistic < limit
    assert chi_square(np.roll(tail_counts, 1), tail_expected)[0] > 2 * limit


def test_the_real_teachers_rows_barely_depend_on_their_batch(real: TransformersEngine, real_ids: np.ndarray) -> None:
    given = [real_ids[:40], real_ids[40:52], real_ids[52:112]]
    together, again = scored(real, given, k=100), scored(real, given, k=100)
    for ids, rows, other in zip(given, together, again, strict=True):
        assert_bit_equal(rows, other)
        assert_close(rows, scored(real, [ids], k=100)[0])
