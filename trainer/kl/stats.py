"""What a loss can tell about a batch beside its value.

Shapes: C positions, F figures.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KLStats:
    """Means over the counted positions, weighted by position weight, as 0-d tensors; nats where not a share.

    A figure that the call could not know (`ce` without labels, the teacher's without rows, any without a counted
    position) is nan.
    """

    kl: Tensor
    """The KL objective."""
    ce: Tensor
    """Cross-entropy of the labels."""
    tail_kl: Tensor
    """The part of `kl` that is not the support's."""
    support_mass: Tensor
    """The teacher's probability on the support."""
    student_entropy: Tensor
    top1_agreement: Tensor
    """Share of positions at which the teacher's likeliest token is the student's too."""
    weight: Tensor
    """Sum of the position weights that the means are over, to combine micro-batches or ranks."""

    @property
    def tail_share(self) -> Tensor:
        """The tail's share of the KL objective."""
        return self.tail_kl / self.kl


FIGURES = tuple(field.name for field in fields(KLStats))
TEACHER_FIGURES = ("kl", "tail_kl", "support_mass", "top1_agreement")


def weighted_sums(weight_C: Tensor, figures: dict[str, Tensor]) -> Tensor:
    """The F sums that `stats_from_sums` reads; [F]."""
    columns_FC = torch.stack([figures.get(name, torch.full_like(weight_C, torch.nan)) for name in FIGURES[:-1]])
    return torch.cat([(columns_FC * weight_C).sum(1), weight_C.sum(0, keepdim=True)])


def stats_from_sums(sums_F: Tensor, *, has_teacher: bool) -> KLStats:
    """Divide the sums by their weight."""
    weight = sums_F[-1]
    means = dict(zip(FIGURES[:-1], (sums_F[:-1] / weight).unbind(), strict=True))
    if not has_teacher:
        means |= {name: torch.full_like(weight, torch.nan) for name in TEACHER_FIGURES}
    return KLStats(**means, weight=weight)
