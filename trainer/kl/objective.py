"""What a position's loss is: the settings that its value depends on beside the tensors, and those that go together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

TailTerm = Literal["sampled", "bucket", "truncated", "renorm", "renorm_both", "to_label"]
Divergence = Literal["forward", "reverse", "jsd"]

# The reverse divergences are right only where both sides are distributions over the same outcomes.
SYMMETRIC_TAILS = ("bucket", "renorm_both")
# T = 1 rows say nothing of a tail at another temperature: the sum of p^(1/T) over it is not known.
TEMPERED_TAILS = ("renorm", "renorm_both")


@dataclass(frozen=True, slots=True)
class Objective:
    """A divergence, the way it treats the tail, and how the student's logits are read.

    z = softcap * tanh(logit_scale * (hidden W^T + bias) / softcap) / temperature.

    Raises:
        ValueError: a setting is out of range, or two of them cannot be right together; says why.
    """

    tail: TailTerm
    divergence: Divergence = "forward"
    beta: float = 0.5
    """Of jsd: the teacher's share of the mixture."""
    ce_weight: float = 0.0
    temperature: float = 1.0
    t2_scaling: bool = False
    """Whether loss and gradient are multiplied by temperature^2."""
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, choices in (("tail", TailTerm), ("divergence", Divergence)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {getattr(self, name)!r}")
        for name in ("temperature", "logit_scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and positive, got {value}")
        if not 0.0 <= self.ce_weight <= 1.0:
            raise ValueError(f"ce_weight must be from 0 to 1, got {self.ce_weight}")
        if not 0.0 < self.beta < 1.0:
            raise ValueError(f"beta must lie between 0 and 1, got {self.beta}; its ends are the other divergences")
        if self.divergence != "forward" and self.tail not in SYMMETRIC_TAILS:
            raise ValueError(
                f"divergence {self.divergence!r} needs both sides on the same outcomes: tail must be one of "
                f"{', '.join(SYMMETRIC_TAILS)}, not {self.tail!r}, under which a student gains by leaving the support"
            )
        if self.temperature != 1.0 and self.tail not in TEMPERED_TAILS:
            raise ValueError(
                f"temperature is {self.temperature}, but a tail stored at temperature 1 cannot be had at another: "
                f"tail must be one of {', '.join(TEMPERED_TAILS)}, got {self.tail!r}"
            )
        if self.temperature != 1.0 and self.ce_weight > 0.0:
            raise ValueError("ce_weight mixes in cross-entropy at temperature 1: add it by a call of its own")
        if self.t2_scaling and self.temperature == 1.0:
            raise ValueError("t2_scaling is set, but temperature is 1")
        if self.tail == "renorm_both" and self.ce_weight > 0.0:
            raise ValueError(
                "renorm_both has no logits off the support, which cross-entropy needs: add it by a call of its own"
            )

    @property
    def kl_weight(self) -> float:
        """The share of the divergence in the mix."""
        return 1.0 - self.ce_weight

    @property
    def factor(self) -> float:
        """What loss and gradient are multiplied by."""
        return self.temperature**2 if self.t2_scaling else 1.0

    @property
    def reads_labels(self) -> bool:
        """Whether a position needs a label."""
        return self.ce_weight > 0.0 or self.tail == "to_label"
