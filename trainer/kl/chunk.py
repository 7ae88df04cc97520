"""One chunk of logits in plain torch: read, judged, and turned in place into the loss's gradient.

Shapes: C positions of the chunk, V vocabulary (of this rank, where the head is split), K support entries, N tail
samples. Equation numbers are the README's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .divergence import Divergence, LogQ, cross_entropy, diverge
from .objective import Objective
from .packing import Part
from .stats import weighted_sums
from .targets import Targets, build_targets
from .vocab_parallel import VocabShard


@dataclass(frozen=True, eq=False)
class Student:
    """What a chunk's logits say; their own memory holds `tail_exp_CV`."""

    log_q: LogQ
    tail_exp_CV: Tensor
    """exp(z - max of the tail) off the support, 0 on it."""
    tail_exp_sum_C: Tensor
    """Over the whole vocabulary."""


@dataclass(frozen=True, eq=False)
class ChunkResult:
    """What is left of a chunk."""

    loss_C: Tensor
    sums_F: Tensor | None
    gradient_CV: Tensor | None


def judge_chunk(
    logits_CV: Tensor,
    bias_V: Tensor | None,
    part: Part,
    weight_C: Tensor | None,
    *,
    with_stats: bool,
    shard: VocabShard | None,
) -> ChunkResult:
    """The positions' losses and, given weights, the gradient of weight * loss in the logits before bias, scale and cap.

    Destroys the logits. `shard` says which part of the vocabulary they are of.
    """
    slope = shape_logits(logits_CV, bias_V, part.objective)
    targets = build_targets(part.rows, part.objective, part.labels_C, logits_CV.dtype)
    student = read_student(logits_CV, targets, part.labels_C, shard)
    divergence = diverge(student.log_q, targets, part.objective)
    loss_C, sums_F, gradient_CV = mixed_loss(divergence, student.log_q, part.objective), None, None
    if with_stats:
        sums_F = weighted_sums(part.weight_C, figures(student, divergence, targets, part, shard))
    if weight_C is not None:
        gradient_CV = write_gradient(student, divergence, targets, part, weight_C, shard).mul_(slope)
    return ChunkResult(loss_C, sums_F, gradient_CV)


def shape_logits(logits_CV: Tensor, bias_V: Tensor | None, objective: Objective) -> Tensor | float:
    """Add bias, scale, cap and temperature in place; return dz / d(hidden W^T), a [C, V] tensor where it is capped."""
    if bias_V is not None:
        logits_CV += bias_V
    scale, cap, temperature = objective.logit_scale, objective.softcap, objective.temperature
    if cap is None:
        if scale != temperature:
            logits_CV *= scale / temperature
        return scale / temperature
    slope_CV = logits_CV.mul_(scale / cap).tanh_().square()
    logits_CV.mul_(cap / temperature)
    if bias_V is not None:
        # A column that its bias switches off stays off.
        logits_CV.masked_fill_(bias_V == -torch.inf, -torch.inf)
    return slope_CV.neg_().add_(1.0).mul_(scale / temperature)


def read_student(logits_CV: Tensor, targets: Targets, labels_C: Tensor | None, shard: VocabShard | None) -> Student:
    """Reduce the logits to log-probabilities, destroying them: their memory then holds `tail_exp_CV`.

    The support leaves the logits before they are summed, so the tail's mass is a sum of what is in it (equation 6);
    1 - Q, taken from the support's side, has no digits left where the student is confident.
    """
    ids_CX = torch.cat([targets.support_ids_CK, targets.draw_ids_CN], dim=1)
    if labels_C is not None:
        ids_CX = torch.cat([ids_CX, labels_C[:, None]], dim=1)
    logits_CX = logits_CV.gather(1, ids_CX) if shard is None else shard.gather(logits_CV, ids_CX)
    k, draws = targets.support_ids_CK.shape[1], targets.draw_ids_CN.shape[1]
    support_CK = logits_CX[:, :k].masked_fill(~targets.support_mask_CK, -torch.inf)

    # Added, not stored: padding has id 0 and must leave a real entry there alone.
    _scatter(logits_CV, targets.support_ids_CK, _only(targets.support_mask_CK, -torch.inf, logits_CV.dtype), shard)
    tail_max_C1 = logits_CV.amax(1, keepdim=True)
    if shard is not None:
        shard.max_(tail_max_C1)
    tail_max_C1.masked_fill_(tail_max_C1 == -torch.inf, 0.0)
    tail_exp_CV = logits_CV.sub_(tail_max_C1).exp_()
    tail_exp_sum_C1 = tail_exp_CV.sum(1, keepdim=True)
    if shard is not None:
        shard.sum_(tail_exp_sum_C1)

    lse_tail_C1 = tail_max_C1 + tail_exp_sum_C1.log()
    lse_C1 = torch.logaddexp(lse_tail_C1, support_CK.logsumexp(1, keepdim=True))
    log_q = LogQ(
        support_CK=support_CK - lse_C1,
        draws_CN=logits_CX[:, k : k + draws] - lse_C1,
        label_C=None if labels_C is None else (logits_CX[:, -1:] - lse_C1).squeeze(1),
        tail_C=(lse_tail_C1 - lse_C1).squeeze(1),
    )
    return Student(log_q, tail_exp_CV, tail_exp_sum_C1.squeeze(1))


def mixed_loss(divergence: Divergence, log_q: LogQ, objective: Objective) -> Tensor:
    """(1 - ce_weight) KL + ce_weight CE; what has no weight is not computed, as it may be infinite; [C]."""
    if log_q.label_C is None or objective.ce_weight == 0.0:
        return divergence.value_C
    if objective.ce_weight == 1.0:
        return -log_q.label_C
    return objective.kl_weight * divergence.value_C - objective.ce_weight * log_q.label_C


def write_gradient(
    student: Student, divergence: Divergence, targets: Targets, part: Part, weight_C: Tensor, shard: VocabShard | None
) -> Tensor:
    """Turn `tail_exp_CV` into the gradient of weight * loss in the logits, equations 7 and 8; [C, V], in place."""
    kl, ce, log_q = part.objective.kl_weight, part.objective.ce_weight, student.log_q
    weight_C1 = weight_C[:, None]
    # The sum is at least exp(0) = 1, or 0 where there is no tail.
    tail_C = (kl * divergence.tail_C + ce * log_q.tail_C.exp()) / student.tail_exp_sum_C.clamp(min=1.0)
    support_CK = kl * divergence.support_CK + ce * log_q.support_CK.exp()

    gradient_CV = student.tail_exp_CV.mul_(weight_C1 * tail_C[:, None])
    _scatter(gradient_CV, targets.support_ids_CK, weight_C1 * support_CK, shard)
    _scatter(gradient_CV, targets.draw_ids_CN, -kl * weight_C1 * targets.draw_weight_CN, shard)
    if part.labels_C is not None and part.objective.reads_labels:
        label_C1 = -weight_C1 * (kl * targets.label_weight_C + ce)[:, None]
        _scatter(gradient_CV, part.labels_C[:, None], label_C1, shard)
    return gradient_CV


def figures(
    student: Student, divergence: Divergence, targets: Targets, part: Part, shard: VocabShard | None
) -> dict[str, Tensor]:
    """The statistics that are at hand before the gradient is written, by the names of `KLStats`; [C] each."""
    log_q = student.log_q
    label = {} if log_q.label_C is None else {"ce": -log_q.label_C}
    likeliest_C1 = targets.log_support_CK.argmax(1, keepdim=True)
    log_q_likeliest_C = log_q.support_CK.gather(1, likeliest_C1).squeeze(1)
    log_q_tail_max_C = log_q.tail_C - student.tail_exp_sum_C.clamp(min=1.0).log()
    log_q_max_C = torch.maximum(log_q.support_CK.amax(1), log_q_tail_max_C)
    return label | {
        "kl": divergence.value_C,
        "tail_kl": divergence.value_C - divergence.head_C,
        "support_mass": -torch.expm1(part.rows.log_tail_mass_P.to(divergence.value_C.dtype).clamp(max=0.0)),
        "top1_agreement": (log_q_likeliest_C >= log_q_max_C).to(log_q_max_C.dtype),
        "student_entropy": _entropy(student, shard),
    }


def _entropy(student: Student, shard: VocabShard | None) -> Tensor:
    """-sum q log q: the support's terms, and the tail's from what the logits' memory holds; [C]."""
    log_q, sum_C = student.log_q, student.tail_exp_sum_C.clamp(min=1.0)
    cross_C = torch.xlogy(student.tail_exp_CV, student.tail_exp_CV).sum(1)
    if shard is not None:
        shard.sum_(cross_C)
    # Inside the tail, -log of a token's share is log(sum) - log(its exp).
    within_C = sum_C.log() - cross_C / sum_C
    q_tail_C = log_q.tail_C.exp()
    tail_C = q_tail_C * within_C + cross_entropy(q_tail_C[:, None], log_q.tail_C[:, None])
    return tail_C + cross_entropy(log_q.support_CK.exp(), log_q.support_CK)


def _scatter(into_CV: Tensor, ids_CX: Tensor, values_CX: Tensor, shard: VocabShard | None) -> None:
    if shard is not None:
        ids_CX, values_CX = shard.own(ids_CX, values_CX)
    into_CV.scatter_add_(1, ids_CX, values_CX)


def _only(mask_CK: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask_CK, dtype=dtype).masked_fill_(mask_CK, value)
