"""The LM head's three GEMMs, with results wider than their operands.

Shapes: C positions of a chunk, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def operand_dtype(hidden_PH: Tensor, weight_VH: Tensor) -> torch.dtype:
    """What hidden and weight are rounded to before a GEMM: autocast's dtype, as in `F.linear`, or the wider of both."""
    dtype = torch.promote_types(hidden_PH.dtype, weight_VH.dtype)
    device = hidden_PH.device.type
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return dtype
    return torch.get_autocast_dtype(device)


def accumulation_dtype(hidden_PH: Tensor, weight_VH: Tensor) -> torch.dtype:
    """What logits, losses and sums of gradients are in: float32, or float64 for float64 inputs."""
    return torch.promote_types(torch.promote_types(hidden_PH.dtype, weight_VH.dtype), torch.float32)


class Head:
    """An LM head whose GEMMs read its own dtype and give `wide`, the accumulation dtype.

    A bf16 result would round the logits before the softmax and puts gradients off by 4 to 23 percent
    (linkedin/Liger-Kernel#1432). CUDA multiplies narrow operands into float32; elsewhere PyTorch has no such GEMM, and
    the operands are widened, the weight in tiles of at most `tile_bytes`.
    """

    def __init__(self, weight_VH: Tensor, wide: torch.dtype, tile_bytes: int) -> None:
        self.weight_VH = weight_VH
        self.wide = wide
        self.operand = weight_VH.dtype if weight_VH.is_cuda else wide
        vocab_size, width = weight_VH.shape
        tiled = self.operand != weight_VH.dtype
        self._tile_rows = max(1, tile_bytes // (width * wide.itemsize)) if tiled else max(1, vocab_size)

    def logits(self, hidden_CH: Tensor, out_CV: Tensor) -> Tensor:
        """Write hidden W^T, in the accumulation dtype."""
        for columns, tile in self._tiles():
            _mm(hidden_CH, tile.t(), out_CV[:, columns])
        return out_CV

    def hidden_gradient(self, logits_gradient_CV: Tensor) -> Tensor:
        """g W, in the accumulation dtype; [C, H]."""
        rows, width = len(logits_gradient_CV), self.weight_VH.shape[1]
        out_CH = logits_gradient_CV.new_zeros(rows, width, dtype=self.wide)
        for columns, tile in self._tiles():
            _addmm(out_CH, logits_gradient_CV[:, columns], tile)
        return out_CH

    def add_weight_gradient(self, sum_VH: Tensor, logits_gradient_CV: Tensor, hidden_CH: Tensor) -> None:
        """Add g^T hidden to a sum in the accumulation dtype."""
        _addmm(sum_VH, logits_gradient_CV.t(), hidden_CH)

    def _tiles(self) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, self.weight_VH.shape[0], self._tile_rows):
            columns = slice(start, start + self._tile_rows)
            yield columns, self.weight_VH[columns].to(self.operand)


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _addmm(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
