"""One chunk of logits: read, judged, and turned in place into the loss's gradient.

Shapes: C positions of the chunk, V vocabulary, K support entries, N tail samples. Equation numbers are the README's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .targets import Targets


@dataclass(frozen=True, eq=False)
class Student:
    """All that the loss reads of the student: log q where the target has weight, and of the tail as one outcome."""

    log_q_support_CK: Tensor
    """-inf at padding."""
    log_q_draws_CN: Tensor
    log_q_label_C: Tensor | None
    log_q_tail_C: Tensor
    """-inf where the support covers the vocabulary."""
    tail_exp_CV: Tensor
    """exp(z - max of the tail) off the support, 0 on it: the logits' own memory."""
    tail_exp_sum_C: Tensor


def read_student(logits_CV: Tensor, targets: Targets, labels_C: Tensor | None) -> Student:
    """Reduce the logits to log-probabilities, destroying them: their memory then holds `tail_exp_CV`.

    The support leaves the logits before they are summed, so the tail's mass is a sum of what is in it (equation 6);
    1 - Q, taken from the support's side, has no digits left where the student is confident.
    """
    logits_support_CK = logits_CV.gather(1, targets.support_ids_CK).masked_fill_(~targets.support_mask_CK, -torch.inf)
    logits_draws_CN = logits_CV.gather(1, targets.draw_ids_CN)
    logits_label_C1 = None if labels_C is None else logits_CV.gather(1, labels_C[:, None])

    # Added, not stored: padding has id 0 and must leave a real entry there alone.
    logits_CV.scatter_add_(1, targets.support_ids_CK, _only(targets.support_mask_CK, -torch.inf, logits_CV.dtype))
    tail_max_C1 = logits_CV.amax(1, keepdim=True)
    tail_max_C1.masked_fill_(tail_max_C1 == -torch.inf, 0.0)
    tail_exp_CV = logits_CV.sub_(tail_max_C1).exp_()
    tail_exp_sum_C1 = tail_exp_CV.sum(1, keepdim=True)

    lse_tail_C1 = tail_max_C1 + tail_exp_sum_C1.log()
    lse_C1 = torch.logaddexp(lse_tail_C1, logits_support_CK.logsumexp(1, keepdim=True))
    return Student(
        log_q_support_CK=logits_support_CK - lse_C1,
        log_q_draws_CN=logits_draws_CN - lse_C1,
        log_q_label_C=None if logits_label_C1 is None else (logits_label_C1 - lse_C1).squeeze(1),
        log_q_tail_C=(lse_tail_C1 - lse_C1).squeeze(1),
        tail_exp_CV=tail_exp_CV,
        tail_exp_sum_C=tail_exp_sum_C1.squeeze(1),
    )


def kl_divergence(student: Student, targets: Targets) -> Tensor:
    """The KL objective of each position in nats, equation 4; [C]."""
    return (
        targets.constant_C
        + _cross_entropy(targets.support_weight_CK, student.log_q_support_CK)
        + _cross_entropy(targets.draw_weight_CN, student.log_q_draws_CN)
        + _cross_entropy(targets.bucket_weight_C[:, None], student.log_q_tail_C[:, None])
    )


def mixed_loss(student: Student, targets: Targets, ce_weight: float) -> Tensor:
    """(1 - ce_weight) KL + ce_weight CE; what has no weight is not computed, as it may be infinite; [C]."""
    if student.log_q_label_C is None or ce_weight == 0.0:
        return kl_divergence(student, targets)
    if ce_weight == 1.0:
        return -student.log_q_label_C
    return (1.0 - ce_weight) * kl_divergence(student, targets) - ce_weight * student.log_q_label_C


def write_gradient(
    student: Student, targets: Targets, labels_C: Tensor | None, weight_C: Tensor, ce_weight: float
) -> Tensor:
    """Turn `tail_exp_CV` into the gradient of weight * loss in the logits, equations 7 and 8; [C, V], in place."""
    kl_weight = 1.0 - ce_weight
    reach_C = kl_weight * targets.mass_C + ce_weight
    tail_C = reach_C * student.log_q_tail_C.exp() - kl_weight * targets.bucket_weight_C
    # The sum is at least exp(0) = 1, or 0 where there is no tail.
    off_support_C = weight_C * tail_C / student.tail_exp_sum_C.clamp(min=1.0)
    on_support_CK = reach_C[:, None] * student.log_q_support_CK.exp() - kl_weight * targets.support_weight_CK

    gradient_CV = student.tail_exp_CV.mul_(off_support_C[:, None])
    gradient_CV.scatter_add_(1, targets.support_ids_CK, weight_C[:, None] * on_support_CK)
    gradient_CV.scatter_add_(1, targets.draw_ids_CN, (-kl_weight * weight_C)[:, None] * targets.draw_weight_CN)
    if labels_C is not None and ce_weight > 0.0:
        gradient_CV.scatter_add_(1, labels_C[:, None], (-ce_weight * weight_C)[:, None])
    return gradient_CV


def figures(student: Student, targets: Targets) -> dict[str, Tensor]:
    """The statistics that are at hand before the gradient is written, by the names of `KLStats`; [C] each."""
    kl_C = kl_divergence(student, targets)
    label = {} if student.log_q_label_C is None else {"ce": -student.log_q_label_C}
    head_C = targets.head_constant_C + _cross_entropy(targets.support_weight_CK, student.log_q_support_CK)
    likeliest_C1 = targets.support_weight_CK.argmax(1, keepdim=True)
    log_q_likeliest_C = student.log_q_support_CK.gather(1, likeliest_C1).squeeze(1)
    log_q_tail_max_C = student.log_q_tail_C - student.tail_exp_sum_C.clamp(min=1.0).log()
    log_q_max_C = torch.maximum(student.log_q_support_CK.amax(1), log_q_tail_max_C)
    return label | {
        "kl": kl_C,
        "tail_kl": kl_C - head_C,
        "support_mass": targets.support_weight_CK.sum(1),
        "top1_agreement": (log_q_likeliest_C >= log_q_max_C).to(kl_C.dtype),
        "student_entropy": _entropy(student),
    }


def _entropy(student: Student) -> Tensor:
    """-sum q log q: the support's terms, and the tail's from what the logits' memory holds; [C]."""
    q_support_CK = student.log_q_support_CK.exp()
    sum_C = student.tail_exp_sum_C.clamp(min=1.0)
    # Inside the tail, -log of a token's share is log(sum) - log(its exp).
    within_C = sum_C.log() - torch.xlogy(student.tail_exp_CV, student.tail_exp_CV).sum(1) / sum_C
    q_tail_C = student.log_q_tail_C.exp()
    tail_C = q_tail_C * within_C + _cross_entropy(q_tail_C[:, None], student.log_q_tail_C[:, None])
    return tail_C + _cross_entropy(q_support_CK, student.log_q_support_CK)


def _cross_entropy(weight_CX: Tensor, log_q_CX: Tensor) -> Tensor:
    """sum of -weight * log q, where an outcome of weight 0 costs nothing however unlikely it is; [C]."""
    return -torch.where(weight_CX > 0, weight_CX * log_q_CX, 0.0).sum(1)


def _only(mask_CK: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask_CK, dtype=dtype).masked_fill_(mask_CK, value)
