"""The objectives as they are defined: dense, obvious, differentiated by autograd. Everything is judged against this.

Shapes: C positions that count, V vocabulary, H hidden width, K support entries, N tail samples, F figures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import PackedPositions, Part, TailTerm
from .rows import TeacherRows
from .stats import FIGURES, weighted_sums


def reference_loss(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    packed: PackedPositions,
    scale: Tensor,
    *,
    with_stats: bool,
) -> tuple[Tensor, Tensor]:
    """What `fused_loss` gives, from [C, V] logits in the dtype of `scale`."""
    with torch.autocast(hidden_PH.device.type, enabled=False):
        part = packed.part(slice(None))
        logits_CV = hidden_PH[part.positions_C].to(scale.dtype) @ weight_VH.to(scale.dtype).t()
        if bias_V is not None:
            logits_CV = logits_CV + bias_V.to(scale.dtype)
        loss = (part.weight_C * dense_loss(logits_CV, part)).sum() * scale
        sums_F = scale.new_zeros(len(FIGURES))
        if with_stats:
            sums_F = weighted_sums(part.weight_C, dense_figures(logits_CV.detach(), part))
    return loss, sums_F


def dense_loss(logits_CV: Tensor, part: Part) -> Tensor:
    """(1 - ce_weight) KL + ce_weight CE of each position, nats; [C]."""
    log_q_CV = logits_CV.log_softmax(1)
    if part.labels_C is None or part.ce_weight == 0.0:
        return dense_kl(log_q_CV, part.rows, part.tail)
    ce_C = -log_q_CV.gather(1, part.labels_C[:, None]).squeeze(1)
    if part.ce_weight == 1.0:
        return ce_C
    return (1.0 - part.ce_weight) * dense_kl(log_q_CV, part.rows, part.tail) + part.ce_weight * ce_C


def dense_kl(log_q_CV: Tensor, rows: TeacherRows, tail: TailTerm) -> Tensor:
    """The KL objective of each position, nats: the table in README, section 2; [C]."""
    p_CV, support_CV, tail_C = _teacher(rows, log_q_CV)
    head_C = (torch.xlogy(p_CV, p_CV) - _times(p_CV, log_q_CV)).sum(1)
    if tail == "truncated":
        return head_C
    if tail == "bucket":
        log_q_tail_C = log_q_CV.masked_fill(support_CV, -torch.inf).logsumexp(1)
        return head_C + torch.xlogy(tail_C, tail_C) - _times(tail_C, log_q_tail_C)
    assert rows.tail_token_ids_PN is not None
    assert rows.entropy_P is not None
    drawn_CN = rows.tail_token_ids_PN >= 0
    share_CN = torch.where(drawn_CN, tail_C[:, None] / drawn_CN.sum(1, keepdim=True).clamp(min=1), 0.0)
    target_CV = p_CV.scatter_add(1, rows.tail_token_ids_PN.clamp(min=0), share_CN)
    return -rows.entropy_P.to(log_q_CV.dtype) - _times(target_CV, log_q_CV).sum(1)


def dense_figures(logits_CV: Tensor, part: Part) -> dict[str, Tensor]:
    """The statistics by the names of `KLStats`; [C] each."""
    log_q_CV = logits_CV.log_softmax(1)
    kl_C, head_C = (dense_kl(log_q_CV, part.rows, tail) for tail in (part.tail, "truncated"))
    p_CV, _, _ = _teacher(part.rows, log_q_CV)
    q_CV = log_q_CV.exp()
    figures = {
        "kl": kl_C,
        "tail_kl": kl_C - head_C,
        "support_mass": p_CV.sum(1),
        "student_entropy": -_times(q_CV, log_q_CV).sum(1),
        "top1_agreement": (p_CV.argmax(1) == q_CV.argmax(1)).to(kl_C.dtype),
    }
    if part.labels_C is not None:
        figures["ce"] = -log_q_CV.gather(1, part.labels_C[:, None]).squeeze(1)
    return figures


def _teacher(rows: TeacherRows, like_CV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p on the support, rescaled to a mass of 1 - t, [C, V]; where the support is, [C, V]; the tail mass t, [C]."""
    positions, vocab_size = like_CV.shape
    kept_CK = rows.token_ids_PK >= 0
    # Padding goes to a column of its own, which is then dropped.
    columns_CK = torch.where(kept_CK, rows.token_ids_PK, vocab_size)
    log_p_CV = like_CV.new_full((positions, vocab_size + 1), -torch.inf)
    log_p_CV = log_p_CV.scatter(1, columns_CK, rows.logprobs_PK.to(like_CV.dtype))[:, :vocab_size]
    support_CV = torch.zeros(positions, vocab_size + 1, dtype=torch.bool, device=like_CV.device)
    support_CV = support_CV.scatter(1, columns_CK, kept_CK)[:, :vocab_size]
    log_tail_C = rows.log_tail_mass_P.to(like_CV.dtype).clamp(max=0.0)
    # A row without support has nothing to rescale.
    mass_C = log_p_CV.exp().sum(1)
    rescale_C = torch.where(mass_C > 0, -torch.expm1(log_tail_C) / mass_C, 0.0)
    return log_p_CV.exp() * rescale_C[:, None], support_CV, log_tail_C.exp()


def _times(weight: Tensor, log_q: Tensor) -> Tensor:
    """weight * log_q, and 0 with a zero gradient where the weight is 0, even if log_q is -inf there."""
    return weight * torch.where(weight > 0, log_q, 0.0)
