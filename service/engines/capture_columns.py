"""The columns of rows as tensors, where the logits are.

Shapes: P positions, K kept entries, N tail samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...format_spec import Rows


class Columns(NamedTuple):
    """The columns of `Rows` as tensors, where the logits are: ids int32, the rest float32."""

    token_ids_PK: Tensor
    logprobs_PK: Tensor
    log_tail_mass_P: Tensor
    logsumexp_P: Tensor
    entropy_P: Tensor
    tail_token_ids_PN: Tensor | None

    def to_rows(self) -> Rows:
        """Bring them into memory."""
        arrays: list[Any] = [None if column is None else column.cpu().numpy() for column in self]
        return Rows(*arrays)

    @classmethod
    def concatenate(cls, parts: Sequence[Columns]) -> Columns:
        """Return the columns of all parts, which are at least one and alike."""
        if len(parts) == 1:
            return parts[0]
        tensors: list[Any] = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        return cls(*tensors)
