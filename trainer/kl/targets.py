"""What a chunk's loss needs of the teacher: a few weights on token ids, worked out from the stored rows.

Shapes: C positions of a chunk, K support entries, N tail samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .packing import TailTerm
from .rows import TeacherRows


@dataclass(frozen=True, eq=False)
class Targets:
    """A KL objective as weights on the student's -log q: README, equation 4.

    Padding has id 0 and weight 0, so that it can be gathered, and added by a scatter, without a branch.
    """

    support_ids_CK: Tensor
    support_mask_CK: Tensor
    """bool; unset at padding."""
    support_weight_CK: Tensor
    draw_ids_CN: Tensor
    draw_weight_CN: Tensor
    bucket_weight_C: Tensor
    """On -log of the student's tail mass."""
    head_constant_C: Tensor
    """What the support's term holds without the student: sum of p log p."""
    constant_C: Tensor
    """What the whole objective holds without the student."""

    @property
    def mass_C(self) -> Tensor:
        """The sum of all weights: what the student's softmax is multiplied by in the gradient."""
        return self.support_weight_CK.sum(1) + self.draw_weight_CN.sum(1) + self.bucket_weight_C


def build_targets(rows: TeacherRows, tail: TailTerm, dtype: torch.dtype) -> Targets:
    """The weights of one objective for these rows, in `dtype`."""
    mask_CK = rows.token_ids_PK >= 0
    # Above 0 only by rounding, where it would turn the head's mass negative.
    log_tail_C = rows.log_tail_mass_P.to(dtype).clamp(max=0.0)
    tail_C = log_tail_C.exp()
    stored_CK = rows.logprobs_PK.to(dtype).masked_fill(~mask_CK, -torch.inf).exp()
    stored_mass_C = stored_CK.sum(1)
    rescale_C = torch.where(stored_mass_C > 0, -torch.expm1(log_tail_C) / stored_mass_C, 0.0)
    weight_CK = stored_CK * rescale_C[:, None]
    head_C = torch.xlogy(weight_CK, weight_CK).sum(1)

    draws_CN, bucket_C, constant_C = rows.token_ids_PK[:, :0], torch.zeros_like(tail_C), head_C
    if tail == "sampled":
        assert rows.tail_token_ids_PN is not None
        assert rows.entropy_P is not None
        draws_CN, constant_C = rows.tail_token_ids_PN, -rows.entropy_P.to(dtype)
    elif tail == "bucket":
        bucket_C, constant_C = tail_C, head_C + torch.xlogy(tail_C, tail_C)
    return Targets(
        support_ids_CK=rows.token_ids_PK.clamp(min=0),
        support_mask_CK=mask_CK,
        support_weight_CK=weight_CK,
        draw_ids_CN=draws_CN.clamp(min=0),
        draw_weight_CN=draw_weights(draws_CN >= 0, tail_C),
        bucket_weight_C=bucket_C,
        head_constant_C=head_C,
        constant_C=constant_C,
    )


def draw_weights(drawn_CN: Tensor, tail_C: Tensor) -> Tensor:
    """The tail's mass in equal shares to a row's draws, 0 at padding; repeats add up wherever they are scattered."""
    share_C = tail_C / drawn_CN.sum(1).clamp(min=1)
    return share_C[:, None] * drawn_CN
