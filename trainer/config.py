"""The settings of a training run, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import InvalidConfig

Tail = Literal["auto", "sampled", "bucket", "truncated", "renorm", "renorm_both", "to_label"]
TAILS: tuple[str, ...] = get_args(Tail)
Divergence = Literal["forward", "reverse", "jsd"]
DIVERGENCES: tuple[str, ...] = get_args(Divergence)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One run: which student learns from which cache, how, and where the result goes.

    `cache` is a request id, a manifest digest or a directory of pulled shards. A step consumes
    `batch_size` sequences, `micro_batch_size` at a time. `ce_weight` mixes in the cross-entropy of the
    text itself; 1 trains on labels alone. `tail`, `divergence`, `beta`, `temperature` and `t2_scaling` are those of
    `topk_kl`, which says what goes with what. `keep_layers` prunes the student when it is loaded.
    """

    student: str
    cache: str
    output: Path
    url: str | None = None
    keep_layers: tuple[int, ...] | None = None
    tail: Tail = "auto"
    divergence: Divergence = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    t2_scaling: bool = False
    ce_weight: float = 0.0
    batch_size: int = 16
    micro_batch_size: int | None = None
    epochs: int = 1
    max_steps: int | None = None
    learning_rate: float = 4e-4
    warmup_fraction: float = 0.05
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    checkpoint_every: int = 100
    check_tokenizer: bool = True

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "checkpoint_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("micro_batch_size", "max_steps"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        self._require("tail", self.tail in TAILS, f"one of {', '.join(TAILS)}")
        self._require("divergence", self.divergence in DIVERGENCES, f"one of {', '.join(DIVERGENCES)}")
        self._require("beta", 0 < self.beta < 1, "between 0 and 1")
        self._require("temperature", self.temperature > 0, "above 0")
        self._require("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        self._require("ce_weight", 0 <= self.ce_weight <= 1, "from 0 to 1")
        self._require("warmup_fraction", 0 <= self.warmup_fraction < 1, "from 0 to below 1")
        for name in ("learning_rate", "grad_clip"):
            self._require(name, getattr(self, name) > 0, "above 0")
        self._require("weight_decay", self.weight_decay >= 0, "0 or more")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise InvalidConfig(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    @property
    def micro(self) -> int:
        """Sequences in one forward pass."""
        return min(self.micro_batch_size or self.batch_size, self.batch_size)

    def identity(self) -> dict[str, Any]:
        """Return what must be the same for a checkpoint to be continued."""
        free = {"output", "url", "device", "checkpoint_every", "micro_batch_size", "check_tokenizer"}
        return {name: value for name, value in asdict(self).items() if name not in free}
