"""How much of a vLLM teacher's plain prefill is left when its rows are captured and written.

One engine, one process, the same prompts: plain prefill (one token, no logprobs), vLLM's own prompt logprobs as dicts
and flat, its tensors kept raw, our hook, and our hook with shards written as a worker writes them. Rates are prompt
tokens a second; plain prefill is measured first and last, and its mean is what the others are held against.
`head_floor_tok_s` is what plain prefill would be with the LM head on every position, by multiplications alone.
With a GPU the teacher has the shape of a known model and random weights; without one it is the small real teacher.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import arguments, finish, need_vllm

from teachercache.format_spec import ScoredSequence, ShardMetadata, ShardWriter
from teachercache.service.engines import load_engine

K, BOTH = 100, (16, 16)
# a shard of 131,072 positions, half of the default
SHARD_PROMPTS = 64
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
GPU_ARGS = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.7, "enforce_eager": True}
CPU_ARGS = {"max_model_len": 1024, "max_num_batched_tokens": 1024}


class Raw:
    """vLLM's prompt logprobs, kept as the tensors that the workers sent."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])


def keep_stock_tensors() -> None:
    """Requests marked `raw` keep vLLM's own tensors: the front end's part of our path, with the workers' own top-k."""
    from vllm.v1.engine import output_processor

    ours = output_processor.LogprobsProcessor

    class RawProcessor(ours):  # type: ignore[misc, valid-type]
        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
            params = request.sampling_params
            if not (params.extra_args or {}).get("raw"):
                return ours.from_new_request(tokenizer, request)
            empty = dict.fromkeys(("tokenizer", "cumulative_logprob", "logprobs", "prompt_logprobs", "num_logprobs"))
            return cls(**empty, num_prompt_logprobs=params.prompt_logprobs)

        def _update_prompt_logprobs(self, tensors: Any) -> None:
            self.prompt_logprobs = Raw([np.array(tensor.numpy()) for tensor in tensors[:3]])

    output_processor.LogprobsProcessor = RawProcessor


class Flow:
    """One engine, and the ways to send prompts through it."""

    def __init__(self, engine: Any, length: int) -> None:
        self.engine, self.length = engine, length
        self.random = np.random.default_rng(0)
        self.numbers = itertools.count()

    def prompts(self, count: int) -> list[Any]:
        """Random token ids, never the same twice."""
        return [self.random.integers(0, self.engine.vocab_size - 1, self.length, np.int32) for _ in range(count)]

    def stock(self, count: int, in_flight: int = 48, **params: Any) -> float:
        """Tokens a second through vLLM's public API."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts = [prompt.tolist() for prompt in self.prompts(count)]

        async def all_of_them() -> None:
            room = asyncio.Semaphore(in_flight)

            async def one(prompt: list[int]) -> None:
                asked = SamplingParams(
                    max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **params
                )
                async with room:
                    name = f"stock-{next(self.numbers)}"
                    async for last in self.engine._llm.generate({"prompt_token_ids": prompt}, asked, name):
                        assert last.finished or last.prompt_logprobs is None

            await asyncio.gather(*map(one, prompts))

        begin = time.perf_counter()
        self.engine._submit(all_of_them()).result()
        return count * self.length / (time.perf_counter() - begin)

    def rows(self, count: int, k: int, tail_samples: int) -> float:
        """Tokens a second through our hook; rows are counted and let go."""
        prompts = self.prompts(count)
        begin = time.perf_counter()
        found = sum(len(rows) for _, rows in self.engine.score(prompts, k=k, tail_samples=tail_samples, seed=0))
        assert found == count * (self.length - 1)
        return count * self.length / (time.perf_counter() - begin)

    def shards(self, count: int, k: int, tail_samples: int, folder: Path) -> float:
        """Tokens a second from prompts to shards on disk; each is encoded while the next is scored, as by a worker."""
        prompts = self.prompts(count)
        zeros = "sha256:" + "0" * 64
        metadata = ShardMetadata(self.engine.fingerprint(zeros, zeros), k, tail_samples, "bf16")
        begin = time.perf_counter()
        with ThreadPoolExecutor(1) as finisher:
            finishing: Future[None] | None = None
            for number, first in enumerate(range(0, count, SHARD_PROMPTS)):
                part = prompts[first : first + SHARD_PROMPTS]
                file = (folder / f"{number}.tkc").open("wb")
                writer = ShardWriter(file, metadata)
                for index, rows in self.engine.score(part, k=k, tail_samples=tail_samples, seed=0):
                    writer.add(ScoredSequence(part[index], rows))
                if finishing is not None:
                    finishing.result()
                finishing = finisher.submit(finish_shard, writer, file)
            if finishing is not None:
                finishing.result()
        return count * self.length / (time.perf_counter() - begin)


def finish_shard(writer: ShardWriter, file: Any) -> None:
    """Encode, and make durable."""
    with file:
        writer.finish()
        file.flush()
        os.fsync(file.fileno())


def teachers(shape: str, folder: Path) -> tuple[Path, dict[str, Any], str]:
    """The teacher's folder, vLLM's settings for it, and its dtype."""
    if torch.cuda.is_available():
        (folder / "config.json").write_text(json.dumps(QWEN3 | SHAPES[shape]))
        return folder, {**GPU_ARGS, "load_format": "dummy"}, "bfloat16"
    from teachercache.demo.model import ensure_model

    return ensure_model(), CPU_ARGS, "float32"


def head_floor(shape: str) -> float:
    """What is left of plain prefill with the head on all positions: multiplications of the trunk over all of them."""
    config = QWEN3 | SHAPES[shape]
    width, heads = config["hidden_size"], config["num_attention_heads"] * 128
    attention = width * (2 * heads + 2 * config["num_key_value_heads"] * 128)
    trunk = config["num_hidden_layers"] * (attention + 3 * width * config["intermediate_size"])
    return trunk / (trunk + width * config["vocab_size"])


def measure_engine(flow: Flow, count: int, folder: Path, *, stock: bool) -> Iterator[tuple[str, float]]:
    """Yield each rate as it is known."""
    few = max(4, count // 8)
    flow.stock(few)
    yield "plain_first", flow.stock(count)
    if stock:
        flow.stock(2, prompt_logprobs=K)
        yield "stock_dicts", flow.stock(few, prompt_logprobs=K)
        yield "stock_flat", flow.stock(max(few, count // 2), prompt_logprobs=K, flat_logprobs=True)
        yield "raw", flow.stock(count, prompt_logprobs=K, extra_args={"raw": True})
    for suffix, (k, tail_samples) in (("", (K, 0)), ("_16_16", BOTH)):
        flow.rows(few, k, tail_samples)
        yield f"hook{suffix}", flow.rows(count, k, tail_samples)
        yield f"end_to_end{suffix}", flow.shards(count, k, tail_samples, folder)
    yield "plain_last", flow.stock(count)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every figure; heads one after the other, each in an engine of its own."""
    figures: dict[str, Any] = {
        "shape": args.shape if torch.cuda.is_available() else "SmolLM2-135M",
        "length": args.length,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path, settings, dtype = teachers(args.shape, folder)
        for head_dtype in dict.fromkeys((dtype, "float32")):
            suffix = "" if head_dtype == dtype else "_fp32_head"
            begin = time.perf_counter()
            engine = load_engine(
                "vllm", path, dtype=dtype, head_dtype=head_dtype, capture_path="hook", engine_args=settings
            )
            figures[f"load_s{suffix}"] = time.perf_counter() - begin
            figures[f"kernel{suffix}"] = engine.fingerprint("sha256:" + "0" * 64, "sha256:" + "0" * 64).kernel
            keep_stock_tensors()
            try:
                for name, rate in measure_engine(Flow(engine, args.length), args.count, folder, stock=not suffix):
                    figures[f"{name}{suffix}_tok_s"] = rate
                    print(f"{name}{suffix}: {rate:,.0f} tok/s", flush=True, file=sys.stderr)
            finally:
                engine.close()
            figures |= ratios(figures, suffix, args.shape)
    return figures


def ratios(figures: dict[str, Any], suffix: str, shape: str) -> dict[str, float]:
    """What the rates of an engine come to."""
    plain = (figures[f"plain_first{suffix}_tok_s"] + figures[f"plain_last{suffix}_tok_s"]) / 2
    found = {f"plain{suffix}_tok_s": plain}
    if torch.cuda.is_available():
        found[f"head_floor{suffix}_tok_s"] = plain * head_floor(shape)
    for rows in ("", "_16_16"):
        whole = figures[f"end_to_end{rows}{suffix}_tok_s"]
        found[f"ratio_plain{rows}{suffix}"] = whole / plain
        found[f"ratio_hook{rows}{suffix}"] = figures[f"hook{rows}{suffix}_tok_s"] / plain
        found[f"ratio_stock_dicts{rows}{suffix}"] = whole / figures["stock_dicts_tok_s"]
        if torch.cuda.is_available():
            found[f"ratio_with_head_floor{rows}{suffix}"] = whole / found[f"head_floor{suffix}_tok_s"]
    return found


if __name__ == "__main__":
    parser = arguments("Prefill with rows captured and written, as a share of vLLM's plain prefill.")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b", help="of the teacher on a GPU (default: 8b)")
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 256, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=128 if on_gpu else 16, help="prompts of a measurement")
    args = parser.parse_args()
    need_vllm()
    finish("capture", measure(args), ["torch", "numpy"], args)
