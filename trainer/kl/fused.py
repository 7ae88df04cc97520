"""The loss through the LM head, chunk by chunk: each chunk's gradient is multiplied away before the next one is read.

Shapes: P positions, R positions that count, C positions of a chunk, V vocabulary, H input width, F figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import check_values
from .chunk import ChunkResult, judge_chunk
from .gemm import Factor, Gemm, wide_dtype
from .gradients import Gradients, keeps_graph
from .packing import PackedPositions
from .plan import Plan
from .stats import FIGURES


class Pass:
    """One walk over the chunks of packed positions."""

    def __init__(self, factors: Sequence[Factor], bias_V: Tensor | None, packed: PackedPositions, plan: Plan) -> None:
        self.factors, self.bias_V, self.packed, self.plan = factors, bias_V, packed, plan
        self.operand, self.wide = plan.operand, wide_dtype(plan.operand)
        self.gemms = [Gemm(f.weight_VH.to(self.operand), self.wide, plan.chunk_bytes) for f in factors]
        self.gemm_dtype = self.gemms[0].operand
        vocab_size = len(factors[0].weight_VH)
        capped = packed.objective.softcap is not None
        widest = vocab_size if plan.shard is None else plan.shard.largest
        self.rows = plan.chunk_rows(len(packed), widest, self.gemm_dtype, capped=capped)
        narrow = plan.impl == "triton" and self.gemm_dtype == self.operand
        dtype = (plan.logits_dtype or self.wide) if narrow else self.wide
        # Rows begin at multiples of 16 entries, so that kernels read 16 bytes at once whatever the vocabulary is.
        shape = min(self.rows, len(packed)), -(-vocab_size // 16) * 16
        memory = self.factors[0].input_PH.new_empty(*shape, dtype=dtype)
        self._logits = memory[:, :vocab_size]
        # The kernels leave the gradient in the logits' own memory, at the width of the GEMMs' operands.
        self._gradient = memory.view(self.gemm_dtype)[:, :vocab_size] if plan.impl == "triton" else None
        self._chunks: Any = None

    def run(self, weight_R: Tensor, scale: Tensor, gradients: Gradients | None) -> tuple[Tensor, Tensor]:
        """The counted positions' losses, [R], and the figures' sums; `gradients` get those of scale * weight * loss."""
        losses_R = torch.empty(len(self.packed), dtype=self.wide, device=scale.device)
        sums_F = losses_R.new_zeros(len(FIGURES))
        for counted in self.packed.slices(self.rows):
            index_C = self.packed.index(counted)
            inputs = [f.input_PH[index_C].to(self.operand).to(self.gemm_dtype) for f in self.factors]
            logits_CV = self._logits[: counted.stop - counted.start]
            for number, (gemm, input_CH) in enumerate(zip(self.gemms, inputs, strict=True)):
                gemm.logits(input_CH, logits_CV, add=number > 0)
            judge = self._triton if self.plan.impl == "triton" else self._torch
            result = judge(logits_CV, counted, weight_R[counted], scale, gradients is not None)
            losses_R[counted] = result.loss_C
            if result.sums_F is not None:
                sums_F += result.sums_F
            if gradients is not None and result.gradient_CV is not None:
                gradients.add(self.gemms, result.gradient_CV, inputs, index_C)
        if gradients is not None:
            gradients.finish()
        self._raise_if_broken()
        return losses_R, sums_F

    def _torch(self, logits_CV: Tensor, counted: slice, weight_C: Tensor, scale: Tensor, gradient: bool) -> ChunkResult:
        part, plan = self.packed.part(counted), self.plan
        weight = weight_C * scale if gradient else None
        return judge_chunk(logits_CV, self.bias_V, part, weight, with_stats=plan.with_stats, shard=plan.shard)

    def _triton(
        self, logits_CV: Tensor, counted: slice, weight_C: Tensor, scale: Tensor, gradient: bool
    ) -> ChunkResult:
        if self._chunks is None:
            from .triton_chunks import TritonChunks

            self._chunks = TritonChunks(
                self.packed,
                scale,
                len(self._logits),
                same_memory=self._logits.dtype == self.gemm_dtype,
                has_teacher=self.plan.has_teacher,
                with_stats=self.plan.with_stats,
            )
        assert self._gradient is not None
        gradient_CV = self._gradient[: len(logits_CV)]
        result: ChunkResult = self._chunks.judge(
            logits_CV, gradient_CV, self.bias_V, counted, weight_C, gradient=gradient
        )
        return result

    def _raise_if_broken(self) -> None:
        """Name what is wrong with the rows that the kernel could not judge."""
        if self.plan.impl == "triton" and self._chunks is not None and bool(self._chunks.broken_R.any()):
            vocab_size = len(self.factors[0].weight_VH)
            check_values(self.packed, vocab_size, has_teacher=self.plan.has_teacher)


class InForward(torch.autograd.Function):
    """loss, figures = scale * sum of weight * loss; keeps gradients, not activations."""

    @staticmethod
    def forward(ctx: Any, packed: PackedPositions, plan: Plan, bias_V: Tensor | None, *tensors: Tensor) -> Any:
        factors = as_factors(tensors)
        walk = Pass(factors, bias_V, packed, plan)
        gradients = Gradients(factors, bias_V, plan, walk.gemm_dtype) if any(plan.wants) else None
        kernel_scale = plan.scale if gradients is None else gradients.kernel_scale
        losses_R, sums_F = walk.run(packed.weight_R, kernel_scale, gradients)
        loss = (losses_R * packed.weight_R).sum() * plan.scale
        ctx.gradients = gradients
        ctx.mark_non_differentiable(sums_F)
        return loss, sums_F

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: Gradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError("this loss gave its gradients to an earlier backward: pass it retain_graph=True")
        given = gradients.times(upstream, keep=keeps_graph())
        if not keeps_graph():
            ctx.gradients = None
        return None, None, *given


class Recomputed(torch.autograd.Function):
    """losses [R], figures; keeps what it was given, and computes each chunk's logits again in backward."""

    @staticmethod
    def forward(ctx: Any, packed: PackedPositions, plan: Plan, bias_V: Tensor | None, *tensors: Tensor) -> Any:
        losses_R, sums_F = Pass(as_factors(tensors), bias_V, packed, plan).run(packed.weight_R, plan.scale, None)
        ctx.save_for_backward(bias_V, *tensors)
        ctx.packed, ctx.plan = packed, plan
        ctx.mark_non_differentiable(sums_F)
        return losses_R, sums_F

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_R: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        bias_V, *tensors = ctx.saved_tensors
        factors = as_factors(tensors)
        # The largest upstream gradient is the scale: what is multiplied into logits' gradients is then of order 1.
        largest = upstream_R.abs().amax() if len(upstream_R) else torch.ones_like(ctx.plan.scale)
        scale = torch.where(largest > 0, largest, 1.0)
        plan = replace(ctx.plan, with_stats=False, scale=scale)
        # As in forward: a backward inside of an autocast region is not to round anything else.
        with torch.autocast(scale.device.type, enabled=False):
            walk = Pass(factors, bias_V, ctx.packed, plan)
            gradients = Gradients(factors, bias_V, plan, walk.gemm_dtype)
            walk.run(upstream_R / scale, gradients.kernel_scale, gradients)
            return None, None, *gradients.times(torch.ones_like(scale), keep=False)


def as_factors(tensors: Sequence[Tensor]) -> list[Factor]:
    """Pair inputs and weights, which autograd wants in a row."""
    return [Factor(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
