"""The gradients of a loss, growing chunk by chunk.

Shapes: P positions, C positions of a chunk, V vocabulary, H input width, S columns that are not skipped.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .gemm import Factor, Gemm, multiply, wide_dtype
from .plan import Plan


class Gradients:
    """Those that are wanted of bias, inputs and weights; a chunk's gradient must come scaled by `kernel_scale`."""

    def __init__(self, factors: Sequence[Factor], bias_V: Tensor | None, plan: Plan, operand: torch.dtype) -> None:
        self._plan = plan
        wide = wide_dtype(operand)
        # fp16 cannot hold a gradient divided by num_items that a loss scale has not yet lifted into its range:
        # it is scaled after the GEMMs, in float32.
        late = operand == torch.float16
        one = torch.ones_like(plan.scale)
        self.kernel_scale = one if late else plan.scale
        self._late_scale = plan.scale if late else one
        if plan.weight_grad_scale is not None:
            self.kernel_scale = self.kernel_scale * plan.weight_grad_scale

        wants_bias, *wants = plan.wants
        self._bias_V = None if bias_V is None or not wants_bias else bias_V.new_zeros(len(bias_V), dtype=wide)
        self._dtypes = [None if bias_V is None else bias_V.dtype]
        self._pairs: list[tuple[Tensor | None, _WeightGradient | None]] = []
        self._given = False
        for factor, of_input, of_weight in zip(factors, wants[::2], wants[1::2], strict=True):
            kept = wide if factor.input_PH.dtype == torch.float16 else factor.input_PH.dtype
            input_PH = torch.zeros_like(factor.input_PH, dtype=kept) if of_input else None
            weight = _WeightGradient(factor.weight_VH, plan, operand) if of_weight else None
            self._pairs.append((input_PH, weight))
            self._dtypes += [factor.input_PH.dtype, factor.weight_VH.dtype]

    def add(
        self, gemms: Sequence[Gemm], logits_gradient_CV: Tensor, inputs_CH: Sequence[Tensor], index_C: Tensor | slice
    ) -> None:
        """Multiply a chunk's gradient in the logits into the others."""
        if self._bias_V is not None:
            self._bias_V += logits_gradient_CV.sum(0, dtype=self._bias_V.dtype)
        operand_CV = logits_gradient_CV.to(gemms[0].operand)
        columns_S = self._significant(operand_CV)
        if columns_S is not None:
            if len(columns_S) == 0:
                return
            operand_CV = operand_CV[:, columns_S]
        for gemm, input_CH, (input_PH, weight) in zip(gemms, inputs_CH, self._pairs, strict=True):
            if input_PH is not None:
                self._add_input(gemm, operand_CV, columns_S, input_PH, index_C)
            if weight is not None:
                weight.add(operand_CV, input_CH, columns_S)

    def finish(self) -> None:
        """Add up what the ranks of a split head have found of the inputs' gradients."""
        if self._plan.shard is not None:
            for input_PH, _ in self._pairs:
                if input_PH is not None:
                    self._plan.shard.sum_(input_PH)

    def times(self, upstream: Tensor, *, keep: bool) -> list[Tensor | None]:
        """The gradients of bias, inputs and weights times the upstream one; in place unless they are to be kept."""
        if self._plan.weight_grad_scale is not None:
            given = float(upstream)
            # A float32 has but seven digits of what was said.
            if not math.isclose(given, self._plan.weight_grad_scale, rel_tol=1e-6):
                raise RuntimeError(
                    f"the head's gradient went into weight.grad for an upstream gradient of "
                    f"{self._plan.weight_grad_scale}, but backward brought {given}: give that as grad_scale"
                )
            if self._given:
                raise RuntimeError(
                    "the head's gradient went into weight.grad once: grad_scale is for one backward pass"
                )
            self._given = True
            upstream = torch.ones_like(upstream)
        late = upstream * self._late_scale
        gradients = [_times(self._bias_V, late, self._dtypes[0], keep)]
        for number, (input_PH, weight) in enumerate(self._pairs):
            input_dtype, weight_dtype = self._dtypes[1 + 2 * number : 3 + 2 * number]
            gradients.append(_times(input_PH, upstream, input_dtype, keep))
            total_VH = None if weight is None or weight.is_in_place else weight.total()
            gradients.append(_times(total_VH, late, weight_dtype, keep))
        return gradients

    def _add_input(
        self, gemm: Gemm, operand_CV: Tensor, columns_S: Tensor | None, input_PH: Tensor, index_C: Tensor | slice
    ) -> None:
        rows, width = len(operand_CV), input_PH.shape[1]
        if isinstance(index_C, slice) and input_PH.dtype == gemm.operand:
            # Chunks come in order: what is behind this one is still to be written.
            spare_XH = input_PH[index_C.stop :] if self._plan.accumulator_dtype == gemm.operand else None
            gemm.input_gradient(operand_CV, input_PH[index_C], columns_S, spare_XH)
            return
        part_CH = operand_CV.new_empty(rows, width, dtype=gemm.wide)
        gemm.input_gradient(operand_CV, part_CH, columns_S)
        input_PH[index_C] = part_CH.mul_(self._late_scale).to(input_PH.dtype)

    def _significant(self, gradient_CV: Tensor) -> Tensor | None:
        if self._plan.skip_small == 0.0:
            return None
        largest_V = torch.linalg.vector_norm(gradient_CV, ord=torch.inf, dim=0)
        return torch.nonzero(largest_V >= self._plan.skip_small * self.kernel_scale).squeeze(1)


class _WeightGradient:
    """The sum of a head's gradient, in the accumulation dtype, or in `weight.grad` itself."""

    def __init__(self, weight_VH: Tensor, plan: Plan, operand: torch.dtype) -> None:
        self.is_in_place = plan.weight_grad_scale is not None
        if self.is_in_place:
            if weight_VH.grad is None:
                weight_VH.grad = torch.zeros_like(weight_VH)
            self._sum_VH, self._started = weight_VH.grad, True
        else:
            wide = wide_dtype(operand)
            # A GEMM gives its operands' dtype or a wider one.
            dtype = plan.accumulator_dtype if plan.accumulator_dtype == operand else wide
            self._sum_VH, self._started = torch.empty_like(weight_VH, dtype=dtype), False

    def add(self, gradient_CV: Tensor, input_CH: Tensor, columns_S: Tensor | None) -> None:
        """Add g^T input; of these columns only, where given."""
        if columns_S is None:
            # The first product is written, not added to zeros.
            multiply(gradient_CV.t(), input_CH, self._sum_VH, add=self._started)
            self._started = True
            return
        part_SH = input_CH.new_empty(len(columns_S), input_CH.shape[1], dtype=self._sum_VH.dtype)
        multiply(gradient_CV.t(), input_CH, part_SH, add=False)
        self.total().index_add_(0, columns_S, part_SH)

    def total(self) -> Tensor:
        """The sum so far."""
        if not self._started:
            self._sum_VH.zero_()
            self._started = True
        return self._sum_VH


def keeps_graph() -> bool:
    """Whether the backward pass that is running may run again, so that nothing kept for it may change."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def _times(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None, keep: bool) -> Tensor | None:
    if gradient is None:
        return None
    # Another dtype is written at once: a wide product would be one more tensor of the head's size.
    in_place = gradient.dtype == dtype and not keep
    out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    if not gradient.is_cuda or gradient.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return torch.mul(gradient, factor, out=out)
    from .triton_chunks import scaled

    return scaled(gradient, factor.float(), out)
