"""Which engine runs a server's teachers, and how; known here so that the API process need not import an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..format_spec.request import AUTO
from .engines.vllm.options import check_engine_args
from .errors import InvalidSettings

DTYPES = ("float32", "bfloat16", "float16")
# whether an engine draws tail samples; a test compares it with the engines
DRAWS_TAIL_SAMPLES = {"transformers": True, "vllm": True, "openai": False}
# whether an engine continues prompts
GENERATES = {"transformers": True, "vllm": True, "openai": False}
# an engine's settings of its own; None where they are vLLM's
OWN_ARGS: dict[str, tuple[str, ...] | None] = {
    "transformers": (),
    "vllm": None,
    "openai": ("base_url", "model", "concurrency"),
}
HEAD_DTYPE = "float32"
CAPTURE_PATHS = (AUTO, "hook", "flat")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine and its settings, for every teacher of a server.

    `dtype` "auto" is what a teacher's config states, `head_dtype` "auto" the same as `dtype`. `engine_args` are
    the engine's own settings, with vllm those of vLLM; `capture_path` says how rows come out of vLLM (`VllmEngine`).

    Raises:
        InvalidSettings: unknown names, or settings that go with another engine.
    """

    engine: str = "transformers"
    dtype: str = AUTO
    head_dtype: str = HEAD_DTYPE
    capture_path: str = AUTO
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in (
            ("engine", sorted(DRAWS_TAIL_SAMPLES)),
            ("dtype", [AUTO, *DTYPES]),
            ("head_dtype", [HEAD_DTYPE, AUTO]),
            ("capture_path", list(CAPTURE_PATHS)),
        ):
            if getattr(self, name) not in known:
                raise InvalidSettings(f"unknown {name} {getattr(self, name)!r}; known: {known}")
        if self.engine != "vllm":
            for name, default in (("head_dtype", HEAD_DTYPE), ("capture_path", AUTO)):
                if getattr(self, name) != default:
                    raise InvalidSettings(f"{name} is a setting of engine 'vllm', and the engine is {self.engine!r}")
        own = OWN_ARGS[self.engine]
        if own is None:
            check_engine_args(self.engine_args)
        elif unknown := sorted(set(self.engine_args) - set(own)):
            raise InvalidSettings(f"engine {self.engine!r} has no setting {unknown[0]!r}; it has {list(own)}")

    @property
    def draws_tail_samples(self) -> bool:
        """Whether rows can have tail samples."""
        return DRAWS_TAIL_SAMPLES[self.engine] and self.capture_path != "flat"

    @property
    def gpus(self) -> int:
        """How many GPUs one teacher takes."""
        if self.engine != "vllm":
            return 1
        sizes = [self.engine_args.get(name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise InvalidSettings(f"tensor_parallel_size and pipeline_parallel_size are counts, not {sizes}")
        return math.prod(sizes)

    def head_dtype_of(self, dtype: str) -> str:
        """Return the dtype of the logits of a model that runs in `dtype`."""
        if self.engine == "openai":
            return "unknown"
        return dtype if self.head_dtype == AUTO else self.head_dtype

    def options(self) -> dict[str, Any]:
        """Return what the engine's class is given beside path and dtypes."""
        if self.engine != "vllm":
            return dict(self.engine_args)
        return {"capture_path": self.capture_path, "engine_args": dict(self.engine_args)}


def parse_engine_args(pairs: list[str]) -> dict[str, Any]:
    """Return {name: value} of `NAME=VALUE` pairs, whose values are JSON or else text.

    Raises:
        ValueError: a pair is none, or a name comes twice.
    """
    args: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.strip().partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not (equals and name.isidentifier()):
            raise ValueError(f"a setting of the engine is given as NAME=VALUE, not {pair!r}")
        if name in args:
            raise ValueError(f"the engine's {name} is given twice")
        try:
            args[name] = json.loads(text)
        except ValueError:
            args[name] = text
    return args
