"""Our hook on vLLM's model runner for GPUs, without a GPU: steps, preemption, failures, requests of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teachercache.format_spec import Rows, content_key, tail_uniforms
from teachercache.service.engines.capture import capture
from teachercache.service.engines.errors import EngineError

pytestmark = pytest.mark.vllm

V, D = 61, 8


class Runner:
    """The part of vLLM's second runner that prompt logprobs touch, with two requests of ours."""

    def __init__(self) -> None:
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

        from teachercache.service.engines.vllm.hook import V2Hook

        generator = torch.Generator().manual_seed(3)
        self.prompt_logprobs_worker: Any = PromptLogprobsWorker(4, torch.device("cpu"))
        self.device = torch.device("cpu")
        self.model_config = SimpleNamespace(get_vocab_size=lambda: V)
        self.weight = torch.randn(D, V, generator=generator)
        self.broken = 0
        self.hook = self.prompt_logprobs_worker = V2Hook(self, self.logits)
        ids = np.random.default_rng(3).integers(0, V, 12).astype(np.int32)
        self.ids = {"a": ids, "b": ids[:8]}
        self.asks = {
            "a": {"k": 5, "tail_samples": 4, "seed": 9, "min_prob": 0.0},
            "b": {"k": 3, "tail_samples": 0, "seed": 9, "min_prob": 0.0},
        }
        self.hidden = {name: torch.randn(len(ids) - 1, D, generator=generator) for name, ids in self.ids.items()}
        for place, name in enumerate(self.asks):
            self.add(name, place)

    def add(self, name: str, place: int) -> None:
        from vllm import SamplingParams

        ask = self.asks[name] | {"key": content_key(self.ids[name]).hex()}
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, extra_args={"teachercache": ask})
        self.hook.add_request(name, place, params)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.broken:
            self.broken -= 1
            raise torch.cuda.OutOfMemoryError("by test")
        return hidden @ self.weight

    def step(self, **parts: tuple[int, int]) -> dict[str, Any]:
        """Run the tokens from .. to of requests, and a token of a request that is none of ours; return the arrays."""
        counts = [end - start for start, end in parts.values()]
        hidden = [self.hidden[name][start:end] for name, (start, end) in parts.items()]
        batch = SimpleNamespace(
            req_ids=[*parts, "other"],
            idx_mapping_np=np.array([*(list(self.asks).index(name) for name in parts), 3]),
            query_start_loc_np=np.cumsum([0, *counts, 1]),
            num_computed_prefill_tokens_np=np.array([*(start for start, _ in parts.values()), 7]),
            num_scheduled_tokens=np.array([*counts, 1]),
            prefill_len_np=np.array([*(len(self.hidden[name]) for name in parts), 7]),
        )
        finished: dict[str, Any] = self.hook.compute_prompt_logprobs(
            self.logits,
            torch.cat([*hidden, torch.full((1, D), torch.nan)]),
            batch,
            torch.empty(0),
            torch.empty(0),
            np.array([len(hidden) for hidden in self.hidden.values()] + [7, 7]),
        )
        return finished

    def rows(self, finished: dict[str, Any], name: str) -> Rows:
        from teachercache.service.engines.vllm.packing import unpack

        ids, floats, *_ = finished[name]
        ask = self.asks[name]
        return unpack(
            ids.numpy(),
            floats.numpy(),
            num_rows=len(self.hidden[name]),
            k=int(ask["k"]),
            tail_samples=int(ask["tail_samples"]),
        )

    def expected(self, name: str) -> Rows:
        ask = self.asks[name]
        uniforms_P = tail_uniforms(9, content_key(self.ids[name]), len(self.hidden[name]))
        return capture(
            self.hidden[name] @ self.weight,
            k=int(ask["k"]),
            tail_samples=int(ask["tail_samples"]),
            uniforms_P=uniforms_P,
        )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner of the only rank."""
    from teachercache.service.engines.vllm import hook

    monkeypatch.setattr(hook, "get_tensor_model_parallel_rank", lambda: 0)
    return Runner()


def assert_rows(rows: Rows, expected: Rows) -> None:
    np.testing.assert_array_equal(rows.token_ids_PK, expected.token_ids_PK)
    np.testing.assert_allclose(rows.logprobs_PK, expected.logprobs_PK, atol=1e-5)
    assert rows.tail_samples == expected.tail_samples
    if expected.tail_token_ids_PN is not None:
        np.testing.assert_array_equal(rows.tail_token_ids_PN, expected.tail_token_ids_PN)


@pytest.mark.parametrize("block", [1000, 3])
def test_requests_come_in_steps_and_in_blocks(runner: Runner, block: int) -> None:
    runner.hook._capture._block = block
    assert runner.step(a=(0, 6)) == {}
    finished = runner.step(a=(6, 11), b=(0, 7))
    assert set(finished) == {"a", "b"}
    for name in finished:
        assert_rows(runner.rows(finished, name), runner.expected(name))
    # the token after the prompt
    assert runner.step() == {}


def test_a_preempted_request_is_added_again(runner: Runner) -> None:
    runner.step(b=(0, 4))
    runner.hook.remove_request("b")
    assert "b" not in runner.hook._asked and "a" in runner.hook._params
    runner.add("b", 1)
    assert runner.step(b=(0, 3)) == {}
    assert_rows(runner.rows(runner.step(b=(3, 7)), "b"), runner.expected("b"))


def test_requests_of_others_stay_with_vllm(runner: Runner) -> None:
    from vllm import SamplingParams

    runner.hook.add_request("plain", 0, SamplingParams(prompt_logprobs=2))
    assert "plain" not in runner.hook._params and runner.hook.uses_prompt_logprobs[0]
    # a request of ours in a place that was another's
    runner.add("a", 0)
    assert not runner.hook.uses_prompt_logprobs[0]


def test_logits_that_fail_fail_their_requests_and_take_part_to_the_end(runner: Runner) -> None:
    runner.hook._capture._block = 3
    runner.broken = 1
    assert runner.step(a=(0, 6)) == {}
    assert runner.broken == 0
    finished = runner.step(a=(6, 11), b=(0, 7))
    with pytest.raises(EngineError, match="OutOfMemoryError: by test"):
        runner.rows(finished, "a")
    assert_rows(runner.rows(finished, "b"), runner.expected("b"))


def test_a_rank_that_does_not_answer_takes_part_in_all_logits(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from teachercache.service.engines.vllm import hook

    seen: list[int] = []
    monkeypatch.setattr(runner.hook._capture, "_answers", False)
    monkeypatch.setattr(runner.hook._capture, "_logits_of", lambda hidden: seen.append(len(hidden)))
    monkeypatch.setattr(hook, "_captured", lambda *args: pytest.fail("a rank that does not answer makes no rows"))
    runner.hook._capture._block = 5
    finished = runner.step(a=(0, 11))
    assert seen == [5, 5, 1]
    with pytest.raises(EngineError, match="does not answer"):
        runner.rows(finished, "a")
