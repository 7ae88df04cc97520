"""The positions that count, packed: what all implementations of the loss work on.

Shapes: P positions, R positions that count, C positions of a part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective
from .rows import TeacherRows


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the positions that count, with all that the loss wants to know of them."""

    index_C: Tensor | slice
    """Where they lie among the P positions: int64, or a slice where all positions count."""
    counted: slice
    """Where they lie among the R positions that count."""
    rows: TeacherRows
    weight_C: Tensor
    """In the accumulation dtype."""
    labels_C: Tensor | None
    objective: Objective

    def __len__(self) -> int:
        return len(self.weight_C)


@dataclass(frozen=True, eq=False)
class PackedPositions:
    """The R positions that count, and the objective they are judged by.

    The rows stay where they are until a part is taken: at k = 100 a copy of them would be a kilobyte per position.
    """

    positions_R: Tensor | None
    """int64; None where all positions count."""
    rows: TeacherRows
    """Of all P positions."""
    weight_R: Tensor
    labels_R: Tensor | None
    objective: Objective

    def __len__(self) -> int:
        return len(self.weight_R)

    def position(self, number: int) -> int:
        """Where the counted position `number` lies among all."""
        return number if self.positions_R is None else int(self.positions_R[number])

    def index(self, counted: slice) -> Tensor | slice:
        """Where these of the counted positions lie among all."""
        return counted if self.positions_R is None else self.positions_R[counted]

    def part(self, counted: slice) -> Part:
        """These of the counted positions; their rows are copied, unless all positions count."""
        labels_C = None if self.labels_R is None else self.labels_R[counted]
        index_C = self.index(counted)
        return Part(index_C, counted, self.rows.select(index_C), self.weight_R[counted], labels_C, self.objective)

    def slices(self, size: int) -> Iterator[slice]:
        """All of them in order, `size` at a time; what is left over comes first."""
        first = len(self) % size or size
        edges = [0, *range(first, len(self) + 1, size)]
        return (slice(start, stop) for start, stop in itertools.pairwise(edges))

    def parts(self, size: int) -> Iterator[Part]:
        """All of them in order, `size` at a time."""
        return map(self.part, self.slices(size))


def pack(
    rows: TeacherRows, weight_P: Tensor | None, labels_P: Tensor | None, *, ignore_index: int, objective: Objective,
    dtype: torch.dtype,
) -> PackedPositions:  # fmt: skip
    """Drop the positions of weight 0 and those whose label is `ignore_index`; weights are given in `dtype`."""
    if weight_P is None and labels_P is None:
        # nothing to drop, and no wait for the device to say so
        weight_R = torch.ones(len(rows), dtype=dtype, device=rows.device)
        return PackedPositions(None, rows, weight_R, None, objective)
    weight_P = torch.ones(len(rows), dtype=dtype, device=rows.device) if weight_P is None else weight_P.to(dtype)
    counted_P = weight_P != 0
    if labels_P is not None:
        counted_P = counted_P & (labels_P != ignore_index)
    positions_R = torch.nonzero(counted_P).squeeze(1)
    labels_R = None if labels_P is None else labels_P[positions_R]
    return PackedPositions(positions_R, rows, weight_P[positions_R], labels_R, objective)
