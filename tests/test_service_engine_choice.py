"""The engine's settings, before any engine is there; and how rows travel out of vLLM's workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from teachercache.service.engine_choice import EngineChoice, parse_engine_args
from teachercache.service.engines import EngineError, InvalidSetting
from teachercache.service.engines.capture import capture_columns
from teachercache.service.engines.vllm.options import HELD, arguments
from teachercache.service.engines.vllm.packing import pack, pack_failure, unpack
from teachercache.service.errors import InvalidSettings


def test_values_are_json_or_text() -> None:
    given = ["max_model_len=4096", "--enforce-eager=true", "tokenizer_mode=slow", 'compilation_config={"level": 0}']
    assert parse_engine_args(given) == {
        "max_model_len": 4096,
        "enforce_eager": True,
        "tokenizer_mode": "slow",
        "compilation_config": {"level": 0},
    }
    for wrong in (["x"], ["=1"], ["a b=1"], ["a=1", "a=2"]):
        with pytest.raises(ValueError, match="engine"):
            parse_engine_args(wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "other"},
        {"dtype": "int8"},
        {"engine": "vllm", "head_dtype": "bfloat16"},
        {"engine": "vllm", "capture_path": "x"},
        {"engine": "transformers", "head_dtype": "auto"},
        {"engine": "transformers", "engine_args": {"max_model_len": 1}},
        {"engine": "openai", "engine_args": {"api_key": "x"}},
        {"engine": "openai", "head_dtype": "auto"},
    ],
)
def test_settings_that_no_engine_has_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidSettings):
        EngineChoice(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HELD)
def test_settings_that_right_rows_need_are_not_the_user_s(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} cannot be set: {HELD[name]}"):
        EngineChoice("vllm", engine_args={name: 1})


def test_what_is_held_wins_and_what_is_given_comes_before_defaults() -> None:
    given = {"max_num_batched_tokens": 7, "tensor_parallel_size": 2}
    found = arguments("/teacher", dtype="bfloat16", head_dtype="float32", given=given, on_gpu=False)
    assert found["max_num_batched_tokens"] == 7 and found["tensor_parallel_size"] == 2 and found["enforce_eager"]
    assert found["enable_prefix_caching"] is False and found["hf_overrides"] == {"head_dtype": "float32"}


def test_plain_top_k_is_all_that_the_public_api_promises() -> None:
    assert EngineChoice("vllm").draws_tail_samples and not EngineChoice("vllm", capture_path="flat").draws_tail_samples


@pytest.mark.parametrize("tail_samples", [0, 5])
def test_rows_survive_the_journey(tail_samples: int) -> None:
    logits_PV = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    logits_PV[2] = torch.nan
    columns = capture_columns(logits_PV, k=4, tail_samples=tail_samples, uniforms_P=np.full(6, 0.5), min_prob=0.05)
    ids, floats = (part.numpy() for part in pack(columns))
    found, expected = unpack(ids, floats, num_rows=6, k=4, tail_samples=tail_samples), columns.to_rows()
    for name in ("token_ids_PK", "logprobs_PK", "log_tail_mass_P", "logsumexp_P", "entropy_P", "tail_token_ids_PN"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.absent_P[2]
    for wrong in ({"num_rows": 5}, {"k": 5}, {"tail_samples": 9}):
        with pytest.raises(EngineError, match="vLLM gave"):
            unpack(ids, floats, **({"num_rows": 6, "k": 4, "tail_samples": tail_samples} | wrong))


def test_a_failure_says_why() -> None:
    ids, floats = (part.numpy() for part in pack_failure("OutOfMemoryError: größer"))
    with pytest.raises(EngineError, match="OutOfMemoryError: größer"):
        unpack(ids, floats, num_rows=6, k=4, tail_samples=0)
