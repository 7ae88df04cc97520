"""The LM head's GEMMs, chunk by chunk, with results wider than their operands.

Shapes: P positions, C positions of a chunk, V vocabulary, H input width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows and columns of an output tile of the GEMMs that cuBLAS picks on Hopper.
TILE = 192


@dataclass(frozen=True, eq=False)
class Factor:
    """One product input W^T of those that the logits are the sum of: the head's own, and an adapter's."""

    input_PH: Tensor
    weight_VH: Tensor


def operand_dtype(factors: Sequence[Factor]) -> torch.dtype:
    """What inputs and weights are rounded to before a GEMM: autocast's dtype, as in `F.linear`, or the widest."""
    dtype = factors[0].input_PH.dtype
    for factor in factors:
        dtype = torch.promote_types(dtype, torch.promote_types(factor.input_PH.dtype, factor.weight_VH.dtype))
    device = factors[0].input_PH.device.type
    if dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return dtype
    return torch.get_autocast_dtype(device)


def wide_dtype(operand: torch.dtype) -> torch.dtype:
    """What losses and sums are in: float32, or float64 for float64 inputs."""
    return torch.promote_types(operand, torch.float32)


class Gemm:
    """The three GEMMs of one factor, whose weight has been rounded to the operands' dtype.

    A bf16 result would round the logits before the softmax, by up to 4 percent of a probability at |z| = 16 and above
    (linkedin/Liger-Kernel#1432 tells of gradients 4 to 23 percent off). CUDA multiplies narrow operands into float32;
    elsewhere PyTorch has no such GEMM, and the operands are widened, the weight in tiles of at most `tile_bytes`.
    """

    def __init__(self, weight_VH: Tensor, wide: torch.dtype, tile_bytes: int) -> None:
        self.weight_VH = weight_VH
        self.operand = weight_VH.dtype if weight_VH.is_cuda else wide
        self.wide = wide
        vocab_size, width = weight_VH.shape
        tiled = self.operand != weight_VH.dtype
        self._tile_rows = max(1, tile_bytes // (max(1, width) * wide.itemsize)) if tiled else max(1, vocab_size)

    def logits(self, input_CH: Tensor, out_CV: Tensor, *, add: bool) -> None:
        """Write input W^T into `out_CV`, or add it there."""
        for columns, tile in self._tiles(self.weight_VH):
            multiply(input_CH, tile.t(), out_CV[:, columns], add=add)

    def input_gradient(
        self, logits_gradient_CV: Tensor, out_CH: Tensor, columns_S: Tensor | None, spare_XH: Tensor | None = None
    ) -> None:
        """Write g W; where `columns_S` is given, g has these of the vocabulary's columns only.

        `spare_XH` is memory whose content nobody needs, for partial sums that may be rounded to its dtype; without it
        they are wide.
        """
        weight_SH = self.weight_VH if columns_S is None else self.weight_VH[columns_S]
        parts = _parts(len(out_CH), weight_SH, spare_XH)
        if parts > 1:
            self._split_sum(logits_gradient_CV, weight_SH, out_CH, parts, spare_XH)
            return
        for number, (columns, tile) in enumerate(self._tiles(weight_SH)):
            multiply(logits_gradient_CV[:, columns], tile, out_CH, add=number > 0)

    def _split_sum(
        self, gradient_CS: Tensor, weight_SH: Tensor, out_CH: Tensor, parts: int, spare_XH: Tensor | None
    ) -> None:
        """Sum over the vocabulary in parts at once.

        The product has few tiles, each a long sum: 165 for 2112 positions and a width of 2880, on the 132 cores of an
        H200. Four times as many keep all of them busy (measured: 6 percent of this GEMM).
        """
        (rows, width), size = out_CH.shape, len(weight_SH) // parts
        gradient_NCS = gradient_CS.as_strided((parts, rows, size), (size, gradient_CS.stride(0), 1))
        weight_NSH = weight_SH.view(parts, size, width)
        if spare_XH is None:
            out_CH.copy_(torch.bmm(gradient_NCS, weight_NSH, out_dtype=self.wide).sum(0))
            return
        sums_NCH = spare_XH[: parts * rows].view(parts, rows, width)
        torch.bmm(gradient_NCS, weight_NSH, out=sums_NCH)
        torch.sum(sums_NCH, dim=0, out=out_CH)

    def _tiles(self, weight_VH: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, len(weight_VH), self._tile_rows):
            columns = slice(start, start + self._tile_rows)
            yield columns, weight_VH[columns].to(self.operand)


def _parts(rows: int, weight_SH: Tensor, spare_XH: Tensor | None) -> int:
    """Into how many parts a sum over the vocabulary is best split for its tiles to come out even on the GPU's cores."""
    vocab_size, width = weight_SH.shape
    if not weight_SH.is_cuda or weight_SH.dtype.itemsize != 2 or vocab_size % 32 or not weight_SH.is_contiguous():
        return 1
    cores = torch.cuda.get_device_properties(weight_SH.device).multi_processor_count
    tiles = -(-rows // TILE) * -(-width // TILE)

    def busy(parts: int) -> float:
        waves = tiles * parts / cores
        return waves / math.ceil(waves)

    fitting = [parts for parts in (1, 2, 4) if spare_XH is None or parts == 1 or len(spare_XH) >= parts * rows]
    best = max(fitting, key=busy)
    return best if busy(best) > busy(1) + 0.05 else 1


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write a b into `out`, which may be wider than its operands, or add it there."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
