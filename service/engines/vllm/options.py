"""What vLLM is told when it starts: what right rows need, what the machine needs, and what the user wants."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidSetting

EXTENSION = "teachercache.service.engines.vllm.hook.CaptureExtension"

# settings of vLLM that are not the user's, and why
HELD = {
    "model": "the teacher is given by --teacher",
    "tokenizer": "sequences come as token ids",
    "skip_tokenizer_init": "sequences come as token ids",
    "dtype": "it is given by --dtype, and part of a request",
    "hf_overrides": "it would make another model of the teacher; the head's dtype is given by --head-dtype",
    "trust_remote_code": "a teacher's own code is not run",
    "quantization": "it would make another model of the teacher; a quantised checkpoint says so itself",
    "kv_cache_dtype": "rows would be less exact than their dtype says",
    "enable_prefix_caching": "rows would depend on which sequences came before",
    "speculative_config": "vLLM has given wrong logprobs with it",
    "enable_lora": "an adapter would make another model of the teacher",
    "logprobs_mode": "rows are of raw logprobs",
    "max_logprobs": "a request says how many entries a row has",
    "worker_extension_cls": "rows are captured by one of ours",
    "generation_config": "a teacher's own sampling settings must not enter",
    "runner": "a teacher generates",
    "data_parallel_size": "a worker runs one teacher; ask for --replicas",
}


def num_cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


# a step of a CPU takes seconds
CPU_DEFAULTS = {"enforce_eager": True, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
# vLLM does not see what capture needs when it measures memory
GPU_DEFAULTS = {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 8192}
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # vLLM would compute with one thread
    "OMP_NUM_THREADS": str(num_cores()),
}
# a process that has asked for GPUs, or has threads, does not fork well
ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def check_engine_args(given: Mapping[str, Any]) -> None:
    """Refuse settings of vLLM that are not the user's.

    Raises:
        InvalidSetting: names the first, and why.
    """
    for name in given:
        if name in HELD:
            raise InvalidSetting(f"vLLM's {name} cannot be set: {HELD[name]}")


def arguments(
    path: str | Path, *, dtype: str, head_dtype: str, given: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a teacher; raises InvalidSetting."""
    check_engine_args(given)
    held = {
        "model": str(path),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "hf_overrides": {"head_dtype": head_dtype},
        "trust_remote_code": False,
        "enable_prefix_caching": False,
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": -1,
        "worker_extension_cls": EXTENSION,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    defaults = GPU_DEFAULTS if on_gpu else CPU_DEFAULTS
    return {**defaults, **given, **held}


def set_environment(*, on_gpu: bool) -> None:
    """Set what vLLM reads from the environment, where the user has not; its worker processes inherit it."""
    wanted = ENVIRONMENT if on_gpu else ENVIRONMENT | CPU_ENVIRONMENT
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
