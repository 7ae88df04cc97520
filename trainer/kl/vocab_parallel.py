"""A head whose vocabulary is split over ranks: what a chunk says to the others, O(C K) numbers and never O(C V).

Shapes: C positions of a chunk, V vocabulary of this rank, X token ids of a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class VocabShard:
    """This rank's rows of the head: ids from `start` on, of a vocabulary of `vocab_size` in all."""

    group: dist.ProcessGroup
    start: int
    size: int
    vocab_size: int
    largest: int
    """The size of the largest part: by it all ranks choose the same chunks, and so meet in the same exchanges."""

    @classmethod
    def of(cls, weight_VH: Tensor, group: dist.ProcessGroup) -> VocabShard:
        """The shard that a rank's part of the head is: parts follow one another in the order of the group's ranks.

        Raises:
            ValueError: a part is empty; on all ranks alike, so that none waits for another.
        """
        sizes: list[int] = [0] * dist.get_world_size(group)
        dist.all_gather_object(sizes, len(weight_VH), group=group)
        if min(sizes) == 0:
            raise ValueError(f"each rank of vocab_group must hold part of the head, but their rows are {sizes}")
        rank = dist.get_rank(group)
        return cls(group, sum(sizes[:rank]), sizes[rank], sum(sizes), max(sizes))

    def own(self, ids_CX: Tensor, values_CX: Tensor) -> tuple[Tensor, Tensor]:
        """Ids as columns of this rank, 0 where they are another's, and values that are 0 there."""
        columns_CX = ids_CX - self.start
        own_CX = (columns_CX >= 0) & (columns_CX < self.size)
        return columns_CX.masked_fill(~own_CX, 0), values_CX.masked_fill(~own_CX, 0.0)

    def gather(self, logits_CV: Tensor, ids_CX: Tensor) -> Tensor:
        """The logits of ids of the whole vocabulary; [C, X]."""
        columns_CX, _ = self.own(ids_CX, ids_CX)
        own_CX = (ids_CX >= self.start) & (ids_CX < self.start + self.size)
        logits_CX = logits_CV.gather(1, columns_CX).masked_fill(~own_CX, 0.0)
        return self.sum_(logits_CX)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor
