"""What a chunk's loss needs of the teacher: a few weights on token ids, worked out from the stored rows.

Shapes: C positions of a chunk, K support entries, N tail samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective
from .rows import TeacherRows


@dataclass(frozen=True, eq=False)
class Targets:
    """A KL objective as weights on the student's -log q: README, equation 4.

    Padding has id 0 and weight 0, so that it can be gathered, and added by a scatter, without a branch.
    """

    support_ids_CK: Tensor
    support_mask_CK: Tensor
    """bool; unset at padding."""
    log_support_CK: Tensor
    """log of the support's weights; -inf at padding."""
    draw_ids_CN: Tensor
    draw_weight_CN: Tensor
    log_bucket_C: Tensor
    """log of the weight on the student's tail mass; -inf where the objective has none."""
    label_weight_C: Tensor
    """The KL's own weight on the label, as `to_label` has it."""
    head_constant_C: Tensor
    """What the support's term holds without the student: sum of p log p."""
    constant_C: Tensor
    """What the whole objective holds without the student."""

    @property
    def support_weight_CK(self) -> Tensor:
        """The support's weights."""
        return self.log_support_CK.exp()

    @property
    def bucket_weight_C(self) -> Tensor:
        """The weight on -log of the student's tail mass."""
        return self.log_bucket_C.exp()

    @property
    def mass_C(self) -> Tensor:
        """The sum of all weights: what the student's softmax is multiplied by in the gradient."""
        sampled_C = self.draw_weight_CN.sum(1) + self.label_weight_C
        return self.support_weight_CK.sum(1) + sampled_C + self.bucket_weight_C


def build_targets(rows: TeacherRows, objective: Objective, labels_C: Tensor | None, dtype: torch.dtype) -> Targets:
    """The weights of one objective for these rows, in `dtype`."""
    mask_CK = rows.token_ids_PK >= 0
    # Above 0 only by rounding, where it would turn the head's mass negative.
    log_tail_C = rows.log_tail_mass_P.to(dtype).clamp(max=0.0)
    log_p_CK = _head(rows, mask_CK, log_tail_C, objective)
    p_CK = log_p_CK.exp()
    head_C = torch.xlogy(p_CK, p_CK).sum(1)

    tail, tail_C = objective.tail, log_tail_C.exp()
    draws_CN, label_C, constant_C = rows.token_ids_PK[:, :0], torch.zeros_like(tail_C), head_C
    log_bucket_C = torch.full_like(tail_C, -torch.inf)
    if tail == "sampled":
        assert rows.tail_token_ids_PN is not None
        assert rows.entropy_P is not None
        draws_CN, constant_C = rows.tail_token_ids_PN, -rows.entropy_P.to(dtype)
    elif tail == "bucket":
        log_bucket_C, constant_C = log_tail_C, head_C + torch.xlogy(tail_C, tail_C)
    elif tail == "to_label":
        assert labels_C is not None
        label_C = tail_C
        # x log x of the label's whole weight instead of its share of the head
        own_C = (p_CK * (rows.token_ids_PK == labels_C[:, None])).sum(1)
        constant_C = head_C - torch.xlogy(own_C, own_C) + torch.xlogy(own_C + tail_C, own_C + tail_C)
    return Targets(
        support_ids_CK=rows.token_ids_PK.clamp(min=0).long(),
        support_mask_CK=mask_CK,
        log_support_CK=log_p_CK,
        draw_ids_CN=draws_CN.clamp(min=0).long(),
        draw_weight_CN=draw_weights(draws_CN >= 0, tail_C),
        log_bucket_C=log_bucket_C,
        label_weight_C=label_C,
        head_constant_C=head_C,
        constant_C=constant_C,
    )


def _head(rows: TeacherRows, mask_CK: Tensor, log_tail_C: Tensor, objective: Objective) -> Tensor:
    """log p of the support, rescaled to what the tail leaves (equation 1), or to 1 for `renorm`; [C, K]."""
    log_p_CK = (rows.logprobs_PK.to(log_tail_C.dtype) / objective.temperature).masked_fill(~mask_CK, -torch.inf)
    log_mass_C = log_p_CK.logsumexp(1)
    log_kept_C = (-torch.expm1(log_tail_C)).log() if not objective.tail.startswith("renorm") else 0.0
    log_rescale_C = torch.where(log_mass_C > -torch.inf, log_kept_C - log_mass_C, 0.0)
    return log_p_CK + log_rescale_C[:, None]


def draw_weights(drawn_CN: Tensor, tail_C: Tensor) -> Tensor:
    """The tail's mass in equal shares to a row's draws, 0 at padding; repeats add up wherever they are scattered."""
    share_C = tail_C / drawn_CN.sum(1).clamp(min=1)
    return share_C[:, None] * drawn_CN
