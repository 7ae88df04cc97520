"""The objectives as they are defined: dense, obvious, differentiated by autograd. Everything is judged against this.

Shapes: C positions that count, V vocabulary, H hidden width, K support entries, N tail samples, F figures.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import Head
from .objective import Objective
from .packing import PackedPositions, Part
from .rows import TeacherRows
from .stats import FIGURES, weighted_sums


def reference_loss(head: Head, packed: PackedPositions, *, with_stats: bool) -> tuple[Tensor, Tensor]:
    """The positions' losses, [R], and the sums behind their statistics, from [R, V] logits."""
    wide = packed.weight_R.dtype
    part = packed.part(slice(0, len(packed)))
    logits_CV = sum_products(head, part).to(wide)
    if head.bias_V is not None:
        logits_CV = logits_CV + head.bias_V.to(wide)
    logits_CV = dense_logits(logits_CV, part.objective)
    losses_C = dense_loss(logits_CV, part)
    sums_F = losses_C.new_zeros(len(FIGURES)).detach()
    if with_stats:
        sums_F = weighted_sums(part.weight_C, dense_figures(logits_CV.detach(), part))
    return losses_C, sums_F


def sum_products(head: Head, part: Part) -> Tensor:
    """hidden W^T, and what adapters add to it."""
    wide = part.weight_C.dtype
    products = [f.input_PH[part.index_C].to(wide) @ f.weight_VH.to(wide).t() for f in head.factors]
    return torch.stack(products).sum(0) if len(products) > 1 else products[0]


def dense_logits(logits_CV: Tensor, objective: Objective) -> Tensor:
    """Scale, cap and temperature."""
    logits_CV = logits_CV * objective.logit_scale
    if objective.softcap is not None:
        off_CV = logits_CV == -torch.inf
        logits_CV = (objective.softcap * torch.tanh(logits_CV / objective.softcap)).masked_fill(off_CV, -torch.inf)
    return logits_CV / objective.temperature


def dense_loss(logits_CV: Tensor, part: Part) -> Tensor:
    """(1 - ce_weight) KL + ce_weight CE of each position, nats; [C]."""
    objective, log_q_CV = part.objective, logits_CV.log_softmax(1)
    if part.labels_C is None or objective.ce_weight == 0.0:
        return dense_kl(log_q_CV, part)
    ce_C = -log_q_CV.gather(1, part.labels_C[:, None]).squeeze(1)
    if objective.ce_weight == 1.0:
        return ce_C
    return objective.kl_weight * dense_kl(log_q_CV, part) + objective.ce_weight * ce_C


def dense_kl(log_q_CV: Tensor, part: Part) -> Tensor:
    """The KL objective of each position, nats: the tables in README, section 2; [C]."""
    return _terms(log_q_CV, part).sum(1)


def _terms(log_q_CV: Tensor, part: Part) -> Tensor:
    """The support's share of the objective, and the rest; [C, 2]."""
    rows, tail = part.rows, part.objective.tail
    p_CV, support_CV, tail_C = _teacher(rows, log_q_CV, part.objective)
    if tail == "renorm_both":
        log_q_CV = log_q_CV.masked_fill(~support_CV, -torch.inf).log_softmax(1)
    if part.objective.divergence != "forward":
        return _both_ways(p_CV, support_CV, tail_C, log_q_CV, part.objective)
    head_C = (torch.xlogy(p_CV, p_CV) - _times(p_CV, log_q_CV)).sum(1)
    rest_C = torch.zeros_like(head_C)
    if tail == "bucket":
        log_q_tail_C = log_q_CV.masked_fill(support_CV, -torch.inf).logsumexp(1)
        rest_C = torch.xlogy(tail_C, tail_C) - _times(tail_C, log_q_tail_C)
    elif tail == "to_label":
        assert part.labels_C is not None
        more_CV = torch.zeros_like(p_CV).scatter_add(1, part.labels_C[:, None], tail_C[:, None])
        entropy_CV = torch.xlogy(p_CV + more_CV, p_CV + more_CV) - torch.xlogy(p_CV, p_CV)
        rest_C = (entropy_CV - _times(more_CV, log_q_CV)).sum(1)
    elif tail == "sampled":
        assert rows.tail_token_ids_PN is not None
        assert rows.entropy_P is not None
        drawn_CN = rows.tail_token_ids_PN >= 0
        share_CN = torch.where(drawn_CN, tail_C[:, None] / drawn_CN.sum(1, keepdim=True).clamp(min=1), 0.0)
        more_CV = torch.zeros_like(p_CV).scatter_add(1, rows.tail_token_ids_PN.clamp(min=0).long(), share_CN)
        rest_C = -rows.entropy_P.to(log_q_CV.dtype) - (torch.xlogy(p_CV, p_CV) + _times(more_CV, log_q_CV)).sum(1)
    return torch.stack([head_C, rest_C], dim=1)


def _both_ways(p_CV: Tensor, support_CV: Tensor, tail_C: Tensor, log_q_CV: Tensor, objective: Objective) -> Tensor:
    """Reverse KL or JSD over the support and, for `bucket`, the tail as one more outcome; [C, 2]."""
    log_q_tail_C = log_q_CV.masked_fill(support_CV, -torch.inf).logsumexp(1)
    if objective.tail == "renorm_both":
        tail_C = torch.zeros_like(tail_C)
        log_q_tail_C = torch.full_like(tail_C, -torch.inf)
    p_CX = torch.cat([p_CV, tail_C[:, None]], dim=1)
    log_q_CX = torch.cat([log_q_CV, log_q_tail_C[:, None]], dim=1)
    inside_CX = F.pad(support_CV, (0, 1), value=True) & (log_q_CX > -torch.inf)
    log_q_CX = log_q_CX.masked_fill(~inside_CX, 0.0)
    q_CX = log_q_CX.exp().masked_fill(~inside_CX, 0.0)
    if objective.divergence == "reverse":
        terms_CX = torch.where(q_CX > 0, q_CX * (log_q_CX - p_CX.log()), 0.0)
    else:
        m_CX = objective.beta * p_CX + (1 - objective.beta) * q_CX
        log_m_CX = m_CX.clamp(min=torch.finfo(m_CX.dtype).tiny).log()
        of_teacher_CX = torch.xlogy(p_CX, p_CX) - _times(p_CX, log_m_CX)
        terms_CX = objective.beta * of_teacher_CX + (1 - objective.beta) * q_CX * (log_q_CX - log_m_CX)
    return torch.stack([terms_CX[:, :-1].sum(1), terms_CX[:, -1]], dim=1)


def dense_figures(logits_CV: Tensor, part: Part) -> dict[str, Tensor]:
    """The statistics by the names of `KLStats`; [C] each."""
    log_q_CV = logits_CV.log_softmax(1)
    terms_C2 = _terms(log_q_CV, part)
    p_CV, support_CV, tail_C = _teacher(part.rows, log_q_CV, part.objective)
    q_CV = log_q_CV.exp()
    figures = {
        "kl": terms_C2.sum(1),
        "tail_kl": terms_C2[:, 1],
        "support_mass": 1.0 - tail_C,
        # A row without support does not say what the teacher's likeliest token is.
        "top1_agreement": ((p_CV.argmax(1) == q_CV.argmax(1)) & support_CV.any(1)).to(q_CV.dtype),
    }
    if part.objective.tail == "renorm_both":
        on_support_CV = q_CV.masked_fill(~support_CV, -1.0)
        return figures | {"top1_agreement": (p_CV.argmax(1) == on_support_CV.argmax(1)).to(q_CV.dtype)}
    figures["student_entropy"] = -_times(q_CV, log_q_CV).sum(1)
    if part.labels_C is not None:
        figures["ce"] = -log_q_CV.gather(1, part.labels_C[:, None]).squeeze(1)
    return figures


def _teacher(rows: TeacherRows, like_CV: Tensor, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """p on the support, rescaled to 1 - t or to 1, [C, V]; where the support is, [C, V]; the tail mass t, [C]."""
    positions, vocab_size = like_CV.shape
    kept_CK = rows.token_ids_PK >= 0
    # Padding goes to a column of its own, which is then dropped.
    columns_CK = torch.where(kept_CK, rows.token_ids_PK, vocab_size).long()
    log_p_CV = like_CV.new_full((positions, vocab_size + 1), -torch.inf)
    log_p_CV = log_p_CV.scatter(1, columns_CK, rows.logprobs_PK.to(like_CV.dtype))[:, :vocab_size]
    support_CV = torch.zeros(positions, vocab_size + 1, dtype=torch.bool, device=like_CV.device)
    support_CV = support_CV.scatter(1, columns_CK, kept_CK)[:, :vocab_size]
    log_tail_C = rows.log_tail_mass_P.to(like_CV.dtype).clamp(max=0.0)
    p_CV = (log_p_CV / objective.temperature).exp()
    # A row without support has nothing to rescale.
    mass_C = p_CV.sum(1)
    kept_C = torch.ones_like(mass_C) if objective.tail.startswith("renorm") else -torch.expm1(log_tail_C)
    rescale_C = torch.where(mass_C > 0, kept_C / mass_C, 0.0)
    return p_CV * rescale_C[:, None], support_CV, log_tail_C.exp()


def _times(weight: Tensor, log_q: Tensor) -> Tensor:
    """weight * log_q, and 0 with a zero gradient where the weight is 0, even if log_q is -inf there."""
    return weight * torch.where(weight > 0, log_q, 0.0)
