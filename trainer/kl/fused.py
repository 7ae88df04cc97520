"""The loss through the LM head, chunk by chunk: each chunk's gradient is multiplied away before the next one is read.

Shapes: P positions, C positions of a chunk, V vocabulary, H hidden width, F figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunk import figures, mixed_loss, read_student, write_gradient
from .head import Head, operand_dtype
from .packing import PackedPositions
from .stats import FIGURES, weighted_sums
from .targets import build_targets


@dataclass(frozen=True, eq=False)
class Plan:
    """How a loss is computed: everything beside the tensors that it is differentiated in."""

    operand: torch.dtype
    """What hidden and weight are rounded to before a GEMM."""
    scale: Tensor
    """0-d, multiplies the sum over positions. Applied after the GEMMs: 1/num_items would push fp16 out of range."""
    chunk_bytes: int
    with_stats: bool
    wants: tuple[bool, bool, bool]
    """Whether hidden, weight and bias need a gradient."""

    @property
    def wide(self) -> torch.dtype:
        """What logits, losses and sums are in."""
        return self.scale.dtype

    def chunk_rows(self, positions: int, vocab_size: int, gradient_dtype: torch.dtype) -> int:
        """Positions per chunk, evenly: as many as have their [C, V] buffers in `chunk_bytes`, and at least one."""
        buffers = [self.wide] + [self.wide] * self.with_stats + [gradient_dtype] * (gradient_dtype != self.wide)
        row_bytes = vocab_size * sum(dtype.itemsize for dtype in buffers)
        most = max(1, self.chunk_bytes // row_bytes)
        chunks = max(1, -(-positions // most))
        return max(1, -(-positions // chunks))


class Gradients:
    """The gradients that are wanted, growing chunk by chunk; those of weight and bias lack the scale."""

    def __init__(self, hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: Plan) -> None:
        # fp16 cannot hold a gradient that a loss scale has not yet lifted into its range.
        kept = plan.wide if hidden_PH.dtype == torch.float16 else hidden_PH.dtype
        hidden, weight, bias = plan.wants
        self._scale = plan.scale
        self.hidden_PH = torch.zeros_like(hidden_PH, dtype=kept) if hidden else None
        self.weight_VH = torch.zeros_like(weight_VH, dtype=plan.wide) if weight else None
        self.bias_V = torch.zeros_like(bias_V, dtype=plan.wide) if bias and bias_V is not None else None

    def add(self, head: Head, logits_gradient_CV: Tensor, hidden_CH: Tensor, positions_C: Tensor) -> None:
        """Multiply a chunk's logits gradient into the gradients that are wanted."""
        if self.bias_V is not None:
            self.bias_V += logits_gradient_CV.sum(0)
        operand_CV = logits_gradient_CV.to(head.operand)
        if self.hidden_PH is not None:
            gradient_CH = head.hidden_gradient(operand_CV).mul_(self._scale)
            self.hidden_PH.index_copy_(0, positions_C, gradient_CH.to(self.hidden_PH.dtype))
        if self.weight_VH is not None:
            head.add_weight_gradient(self.weight_VH, operand_CV, hidden_CH)


class _FusedLoss(torch.autograd.Function):
    """loss, figures = scale * sum of weight * loss; keeps gradients, not activations."""

    @staticmethod
    def forward(
        ctx: Any, hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, packed: PackedPositions, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        loss, sums_F, gradients = _accumulate(hidden_PH, weight_VH, bias_V, packed, plan)
        ctx.save_for_backward(gradients.hidden_PH, gradients.weight_VH, gradients.bias_V, plan.scale)
        ctx.dtypes = hidden_PH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype
        ctx.mark_non_differentiable(sums_F)
        return loss, sums_F

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, bias_V, scale = ctx.saved_tensors
        hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
        return (
            _times(hidden_PH, upstream, hidden_dtype),
            _times(weight_VH, upstream * scale, weight_dtype),
            _times(bias_V, upstream * scale, bias_dtype),
            None,
            None,
        )


def fused_loss(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    packed: PackedPositions,
    scale: Tensor,
    *,
    chunk_bytes: int,
    with_stats: bool,
) -> tuple[Tensor, Tensor]:
    """scale * the weighted sum of the packed positions' losses, 0-d, and the sums behind their statistics, [F]."""
    hidden, weight, bias = (
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (hidden_PH, weight_VH, bias_V)
    )
    operand = operand_dtype(hidden_PH, weight_VH)
    plan = Plan(operand, scale, chunk_bytes, with_stats, wants=(hidden, weight, bias))
    loss, sums_F = _FusedLoss.apply(hidden_PH, weight_VH, bias_V, packed, plan)  # type: ignore[no-untyped-call]
    return loss, sums_F


def _accumulate(
    hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, packed: PackedPositions, plan: Plan
) -> tuple[Tensor, Tensor, Gradients]:
    head = Head(weight_VH.to(plan.operand), plan.wide, plan.chunk_bytes)
    gradients = Gradients(hidden_PH, weight_VH, bias_V, plan)
    rows = plan.chunk_rows(len(packed), len(weight_VH), head.operand)
    logits = hidden_PH.new_empty(rows, len(weight_VH), dtype=plan.wide)
    loss, sums_F = plan.scale.new_zeros(()), plan.scale.new_zeros(len(FIGURES))
    for chunk in packed.parts(rows):
        hidden_CH = hidden_PH[chunk.positions_C].to(plan.operand).to(head.operand)
        logits_CV = head.logits(hidden_CH, logits[: len(chunk)])
        if bias_V is not None:
            logits_CV += bias_V
        targets = build_targets(chunk.rows, chunk.tail, plan.wide)
        student = read_student(logits_CV, targets, chunk.labels_C)
        loss += (chunk.weight_C * mixed_loss(student, targets, chunk.ce_weight)).sum()
        if plan.with_stats:
            sums_F += weighted_sums(chunk.weight_C, figures(student, targets))
        if any(plan.wants):
            gradient_CV = write_gradient(student, targets, chunk.labels_C, chunk.weight_C, chunk.ce_weight)
            gradients.add(head, gradient_CV, hidden_CH, chunk.positions_C)
    return loss * plan.scale, sums_F, gradients


def _times(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return None
    # Written straight into the input's dtype: a wide product would be another tensor of the head's size.
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
