"""`renorm_both`: teacher and student over the support alone, which takes K rows of the head and no vocabulary.

Shapes: P positions, R positions that count, C positions of a chunk, K support entries, V vocabulary, H input width,
F figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunk import shape_logits
from .divergence import Divergence, LogQ, diverge
from .fused import as_factors
from .gemm import Factor, wide_dtype
from .packing import PackedPositions, Part
from .plan import Plan
from .stats import FIGURES, weighted_sums
from .targets import build_targets


class SupportOnly(torch.autograd.Function):
    """losses [R], figures; each chunk's K logits are computed again in backward."""

    @staticmethod
    def forward(ctx: Any, packed: PackedPositions, plan: Plan, bias_V: Tensor | None, *tensors: Tensor) -> Any:
        walk = _Walk(as_factors(tensors), bias_V, packed, plan)
        losses_R = torch.empty(len(packed), dtype=walk.wide, device=plan.scale.device)
        sums_F = losses_R.new_zeros(len(FIGURES))
        for part in packed.parts(walk.rows):
            divergence, log_q_CK, _ = walk.judge(part, walk.gather(part))
            losses_R[part.counted] = divergence.value_C
            if plan.with_stats:
                sums_F += weighted_sums(part.weight_C, _figures(part, divergence, log_q_CK))
        ctx.save_for_backward(bias_V, *tensors)
        ctx.packed, ctx.plan = packed, plan
        ctx.mark_non_differentiable(sums_F)
        return losses_R, sums_F

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_R: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        bias_V, *tensors = ctx.saved_tensors
        walk = _Walk(as_factors(tensors), bias_V, ctx.packed, ctx.plan)
        given = [bias_V, *tensors]
        sums = [
            torch.zeros_like(tensor, dtype=walk.wide) if wanted else None
            for tensor, wanted in zip(given, ctx.plan.wants, strict=True)
        ]
        # As in forward: a backward inside of an autocast region is not to round anything else.
        with torch.autocast(upstream_R.device.type, enabled=False):
            for part in ctx.packed.parts(walk.rows):
                gathered = walk.gather(part)
                divergence, _, slope = walk.judge(part, gathered)
                gradient_CK = upstream_R[part.counted, None] * divergence.support_CK * slope
                walk.add(part, gathered, gradient_CK, sums)
        typed = [None if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, given, strict=True)]
        return None, None, *typed


class _Walk:
    """The K logits of each position, from K rows of each factor's weight."""

    def __init__(self, factors: Sequence[Factor], bias_V: Tensor | None, packed: PackedPositions, plan: Plan) -> None:
        self.factors, self.bias_V, self.objective = factors, bias_V, packed.objective
        self.operand, self.wide = plan.operand, wide_dtype(plan.operand)
        width = sum(factor.weight_VH.shape[1] for factor in factors)
        # two [C, K, H] tensors: the head's rows and their gradients
        self.rows = max(1, plan.chunk_bytes // (2 * packed.rows.token_ids_PK.shape[1] * width * self.wide.itemsize))

    def gather(self, part: Part) -> list[tuple[Tensor, Tensor]]:
        """Each factor's inputs and rows of weight, rounded to the operands' dtype."""
        ids_CK = part.rows.token_ids_PK.clamp(min=0).long()
        rounded = [
            (f.input_PH[part.index_C].to(self.operand), f.weight_VH[ids_CK].to(self.operand)) for f in self.factors
        ]
        return [(input_CH.to(self.wide), rows_CKH.to(self.wide)) for input_CH, rows_CKH in rounded]

    def judge(self, part: Part, gathered: list[tuple[Tensor, Tensor]]) -> tuple[Divergence, Tensor, Tensor | float]:
        """The divergence, the student's log-probabilities on the support, and dz / d(hidden W^T)."""
        products = [torch.einsum("ch,ckh->ck", input_CH, rows_CKH) for input_CH, rows_CKH in gathered]
        logits_CK = torch.stack(products).sum(0)
        targets = build_targets(part.rows, self.objective, None, self.wide)
        bias_CK = None if self.bias_V is None else self.bias_V[targets.support_ids_CK].to(self.wide)
        slope = shape_logits(logits_CK, bias_CK, self.objective)
        log_q_CK = logits_CK.masked_fill(~targets.support_mask_CK, -torch.inf).log_softmax(1)
        none_C = torch.full_like(log_q_CK[:, 0], -torch.inf)
        log_q = LogQ(log_q_CK, log_q_CK[:, :0], None, none_C)
        return diverge(log_q, targets, self.objective), log_q_CK, slope

    def add(
        self, part: Part, gathered: list[tuple[Tensor, Tensor]], gradient_CK: Tensor, sums: list[Tensor | None]
    ) -> None:
        """Add a chunk's gradients to those of bias, inputs and weights."""
        flat_X = part.rows.token_ids_PK.clamp(min=0).long().reshape(-1)
        bias_V, *pairs = sums
        if bias_V is not None:
            bias_V.index_add_(0, flat_X, gradient_CK.reshape(-1))
        for (input_CH, rows_CKH), input_PH, weight_VH in zip(gathered, pairs[::2], pairs[1::2], strict=True):
            if input_PH is not None:
                input_PH[part.index_C] = torch.einsum("ck,ckh->ch", gradient_CK, rows_CKH)
            if weight_VH is not None:
                weight_VH.index_add_(0, flat_X, (gradient_CK[..., None] * input_CH[:, None]).flatten(0, 1))


def _figures(part: Part, divergence: Divergence, log_q_CK: Tensor) -> dict[str, Tensor]:
    """What a support alone can tell."""
    mass_C = part.rows.logprobs_PK.masked_fill(part.rows.token_ids_PK < 0, -torch.inf).exp().sum(1)
    logprobs_CK = part.rows.logprobs_PK.masked_fill(part.rows.token_ids_PK < 0, -torch.inf)
    agrees_C = logprobs_CK.argmax(1) == log_q_CK.argmax(1)
    return {
        "kl": divergence.value_C,
        "tail_kl": torch.zeros_like(divergence.value_C),
        "support_mass": mass_C.to(divergence.value_C.dtype),
        "top1_agreement": agrees_C.to(divergence.value_C.dtype),
    }
