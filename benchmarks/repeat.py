"""How far a vLLM teacher's rows repeat, and what it costs to have them repeat to the bit.

The same sequences are scored in two orders by an engine as we set it (throughput mode), then by one that works on a
sequence at a time (truth mode: `max_num_seqs=1`, steps as long as the context, and vLLM's batch invariance on a GPU).
Of each: the share of sequences whose rows are the same to the bit, the largest and mean difference of a logprob, the
share of draws that agree, and tokens a second.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import arguments, finish, need_vllm
from capture import QWEN3, SHAPES

from teachercache.format_spec import Rows
from teachercache.service.engines import Engine, load_engine
from teachercache.service.engines.sequences import Ids

ASKED = {"k": 16, "tail_samples": 16, "seed": 0}
INVARIANT = "VLLM_BATCH_INVARIANT"


def teacher(folder: Path, length: int) -> tuple[Path, dict[str, Any], str]:
    """The teacher's folder, vLLM's settings for it, and its dtype."""
    settings = {"max_model_len": length, "max_num_batched_tokens": max(length, 2048)}
    if torch.cuda.is_available():
        (folder / "config.json").write_text(json.dumps(QWEN3 | SHAPES["8b"]))
        return folder, {**settings, "load_format": "dummy", "gpu_memory_utilization": 0.7}, "bfloat16"
    from teachercache.demo.model import ensure_model

    return ensure_model(), settings, "float32"


def score(engine: Engine, sequences: list[Ids], order: list[int]) -> tuple[dict[int, Rows], float]:
    """The rows of each sequence, given in this order, and tokens a second."""
    begin = time.perf_counter()
    found = dict(engine.score([sequences[index] for index in order], **ASKED))
    seconds = time.perf_counter() - begin
    return {order[place]: rows for place, rows in found.items()}, sum(map(len, sequences)) / seconds


def spread(engine: Engine, sequences: list[Ids]) -> dict[str, float]:
    """How rows differ between two orders."""
    order = np.random.default_rng(1).permutation(len(sequences)).tolist()
    score(engine, sequences[:4], list(range(4)))
    first, rate = score(engine, sequences, list(range(len(sequences))))
    second, _ = score(engine, sequences, order)
    pairs = [(first[index], second[index]) for index in range(len(sequences))]
    differences = np.concatenate([np.abs(a.logprobs_PK - b.logprobs_PK).ravel() for a, b in pairs])
    draws = [(a.tail_token_ids_PN == b.tail_token_ids_PN).mean() for a, b in pairs]
    return {
        "bitwise": float(np.mean([same(a, b) for a, b in pairs])),
        "max_logprob_difference": float(differences.max()),
        "mean_logprob_difference": float(differences.mean()),
        "draws_agree": float(np.mean(draws)),
        "tok_s": rate,
    }


def same(first: Rows, second: Rows) -> bool:
    """Whether two sequences' rows are the same to the bit."""
    names = ("token_ids_PK", "logprobs_PK", "log_tail_mass_P", "logsumexp_P", "entropy_P", "tail_token_ids_PN")
    return all(getattr(first, name).tobytes() == getattr(second, name).tobytes() for name in names)


def measure(count: int, length: int) -> dict[str, Any]:
    """Both modes, each in an engine of its own."""
    figures: dict[str, Any] = {"count": count, "length": length}
    with tempfile.TemporaryDirectory() as scratch:
        path, settings, dtype = teacher(Path(scratch), length)
        random = np.random.default_rng(0)
        # of many lengths, so that the company of a sequence changes with the order
        lengths = random.integers(length // 4, length + 1, count)
        sequences: list[Ids] = [random.integers(0, 49_000, size).astype(np.int32) for size in lengths]
        for mode in ("throughput", "truth"):
            os.environ[INVARIANT] = "1" if mode == "truth" and torch.cuda.is_available() else "0"
            given = settings if mode == "throughput" else {**settings, "max_num_seqs": 1}
            engine = load_engine("vllm", path, dtype=dtype, capture_path="hook", engine_args=given)
            try:
                figures |= {f"{mode}_{name}": value for name, value in spread(engine, sequences).items()}
            finally:
                engine.close()
            print({name: value for name, value in figures.items() if mode in name}, file=sys.stderr, flush=True)
    figures["truth_cost"] = figures["throughput_tok_s"] / figures["truth_tok_s"]
    return figures


if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    parser = arguments("How far rows repeat, and what it costs to have them repeat to the bit.")
    parser.add_argument("--count", type=int, default=128 if on_gpu else 48)
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 256)
    args = parser.parse_args()
    need_vllm()
    finish("repeat", measure(args.count, args.length), ["vllm", "torch", "numpy"], args)
