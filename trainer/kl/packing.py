"""The positions that count, packed: what both implementations of the loss work on.

Shapes: P positions, R positions that count, C positions of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .rows import TeacherRows

TailTerm = Literal["sampled", "bucket", "truncated"]


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the positions that count, with all that the loss wants to know of them."""

    positions_C: Tensor
    """int64, where each one lies among the P positions."""
    rows: TeacherRows
    weight_C: Tensor
    """In the accumulation dtype."""
    labels_C: Tensor | None
    tail: TailTerm
    ce_weight: float

    def __len__(self) -> int:
        return len(self.positions_C)


@dataclass(frozen=True, eq=False)
class PackedPositions:
    """The R positions that count, and the objective they are judged by.

    The rows stay where they are until a part is taken: at k = 100 a copy of them would be a kilobyte per position.
    """

    positions_R: Tensor
    rows: TeacherRows
    """Of all P positions."""
    weight_R: Tensor
    labels_R: Tensor | None
    tail: TailTerm
    ce_weight: float

    def __len__(self) -> int:
        return len(self.positions_R)

    def part(self, index: slice) -> Part:
        positions_C = self.positions_R[index]
        labels_C = None if self.labels_R is None else self.labels_R[index]
        rows, weight_C = self.rows.select(positions_C), self.weight_R[index]
        return Part(positions_C, rows, weight_C, labels_C, self.tail, self.ce_weight)

    def parts(self, size: int) -> Iterator[Part]:
        """All of them in order, `size` at a time."""
        return (self.part(slice(start, start + size)) for start in range(0, len(self), size))


def pack(
    rows: TeacherRows,
    weight_P: Tensor,
    labels_P: Tensor | None,
    *,
    ignore_index: int,
    tail: TailTerm,
    ce_weight: float,
) -> PackedPositions:
    """Drop the positions of weight 0 and those whose label is `ignore_index`."""
    counted_P = weight_P != 0
    if labels_P is not None:
        counted_P = counted_P & (labels_P != ignore_index)
    positions_R = torch.nonzero(counted_P).squeeze(1)
    labels_R = None if labels_P is None else labels_P[positions_R]
    return PackedPositions(positions_R, rows, weight_P[positions_R], labels_R, tail, ce_weight)
