"""A divergence between the teacher's weights and the student's log-probabilities, with its gradient in the logits.

Shapes: C positions of a chunk, K support entries, N tail samples. Equation numbers are the README's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective
from .targets import Targets


@dataclass(frozen=True, eq=False)
class LogQ:
    """The student's log-probabilities where the target has weight, and of the tail as one outcome."""

    support_CK: Tensor
    """-inf at padding."""
    draws_CN: Tensor
    label_C: Tensor | None
    tail_C: Tensor
    """-inf where the support covers the vocabulary."""


@dataclass(frozen=True, eq=False)
class Divergence:
    """The value of each position in nats, and the gradient in the logits that leave draws and label out."""

    value_C: Tensor
    head_C: Tensor
    """The support's share of `value_C`."""
    support_CK: Tensor
    """In each logit of the support; 0 at padding."""
    tail_C: Tensor
    """In the tail's logits, to be shared out by the softmax over the tail."""


def diverge(log_q: LogQ, targets: Targets, objective: Objective) -> Divergence:
    """The divergence of one chunk."""
    if objective.divergence == "forward":
        return _forward(log_q, targets)
    # The k + 1 outcomes in one row: the support, then the tail.
    log_p_CX = torch.cat([targets.log_support_CK, targets.log_bucket_C[:, None]], dim=1)
    log_q_CX = torch.cat([log_q.support_CK, log_q.tail_C[:, None]], dim=1)
    return _both_ways(log_p_CX, log_q_CX, objective)


def _forward(log_q: LogQ, targets: Targets) -> Divergence:
    """Equation 4, and equation 5 without draws and label."""
    support_CK, bucket_C = targets.support_weight_CK, targets.bucket_weight_C
    head_C = targets.head_constant_C + cross_entropy(support_CK, log_q.support_CK)
    rest_C = cross_entropy(targets.draw_weight_CN, log_q.draws_CN)
    rest_C = rest_C + cross_entropy(bucket_C[:, None], log_q.tail_C[:, None])
    if log_q.label_C is not None:
        rest_C = rest_C + cross_entropy(targets.label_weight_C[:, None], log_q.label_C[:, None])
    mass_C = targets.mass_C
    return Divergence(
        value_C=head_C + (targets.constant_C - targets.head_constant_C) + rest_C,
        head_C=head_C,
        support_CK=mass_C[:, None] * log_q.support_CK.exp() - support_CK,
        tail_C=mass_C * log_q.tail_C.exp() - bucket_C,
    )


def _both_ways(log_p_CX: Tensor, log_q_CX: Tensor, objective: Objective) -> Divergence:
    """Reverse KL and JSD of the outcomes X: equations 9 to 11."""
    p_CX, q_CX = log_p_CX.exp(), log_q_CX.exp()
    if objective.divergence == "reverse":
        slope_CX = _difference(log_q_CX, log_p_CX)
        terms_CX = _times(q_CX, slope_CX)
    else:
        beta = objective.beta
        log_m_CX = torch.logaddexp(log_p_CX + math.log(beta), log_q_CX + math.log1p(-beta))
        slope_CX = (1.0 - beta) * _difference(log_q_CX, log_m_CX)
        terms_CX = _times(q_CX, slope_CX) + beta * _times(p_CX, _difference(log_p_CX, log_m_CX))
    mean_C1 = _times(q_CX, slope_CX).sum(1, keepdim=True)
    gradient_CX = _times(q_CX, slope_CX - mean_C1)
    return Divergence(terms_CX.sum(1), terms_CX[:, :-1].sum(1), gradient_CX[:, :-1], gradient_CX[:, -1])


def cross_entropy(weight_CX: Tensor, log_q_CX: Tensor) -> Tensor:
    """sum of -weight * log q, where an outcome of weight 0 costs nothing however unlikely it is; [C]."""
    return -_times(weight_CX, log_q_CX).sum(1)


def _times(weight: Tensor, value: Tensor) -> Tensor:
    return torch.where(weight > 0, weight * value, 0.0)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b, and 0 where a is -inf: what it is multiplied by is 0 there."""
    return torch.where(a > -torch.inf, a - b, 0.0)
