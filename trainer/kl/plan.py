"""How a loss is computed, beside what it is.

Shapes: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gemm import TILE, wide_dtype
from .vocab_parallel import VocabShard


@dataclass(frozen=True, eq=False)
class Plan:
    """How a loss is computed: everything beside the tensors that it is differentiated in."""

    scale: Tensor
    """0-d, multiplies the sum over positions."""
    chunk_bytes: int
    operand: torch.dtype
    """What inputs and weights are rounded to before a GEMM; backward runs where autocast no longer tells."""
    impl: str = "torch"
    with_stats: bool = False
    has_teacher: bool = True
    logits_dtype: torch.dtype | None = None
    """None: the wide one."""
    accumulator_dtype: torch.dtype | None = None
    """Of the heads' gradients; None: the wide one."""
    skip_small: float = 0.0
    weight_grad_scale: float | None = None
    """Where given, head gradients go straight into `weight.grad`, multiplied by it."""
    shard: VocabShard | None = None
    wants: tuple[bool, ...] = ()
    """Whether the bias, and then each input and weight, needs a gradient."""

    def chunk_rows(self, positions: int, vocab_size: int, operand: torch.dtype, *, capped: bool) -> int:
        """Positions per chunk: as many as have their [C, V] buffers in `chunk_bytes`, and at least one."""
        wide = wide_dtype(operand)
        if self.impl == "triton":
            row_bytes = vocab_size * (self.logits_dtype or wide).itemsize
        else:
            buffers = 1 + self.with_stats + capped
            row_bytes = vocab_size * (buffers * wide.itemsize + (operand != wide) * operand.itemsize)
        most = max(1, self.chunk_bytes // row_bytes)
        return min(most // TILE * TILE or most, max(1, positions))
