"""From the client's numpy batches to tensors.

Shapes: B sequences, T tokens, P = T - 1 rows, R rows that count, K entries, N tail samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..client import TopkBatch
from .kl import TeacherRows


@dataclass(frozen=True, eq=False)
class StudentBatch:
    """What one forward pass needs; rows and labels only of the R positions that count."""

    input_ids_BT: Tensor
    counted_BP: Tensor
    rows: TeacherRows
    labels_R: Tensor


def micro_batches(batch: TopkBatch, size: int) -> Iterator[TopkBatch]:
    """Split a batch into parts of at most `size` sequences, each cut to its longest."""
    for first in range(0, len(batch.input_ids_BT), size):
        lengths = batch.attention_mask_BT[first : first + size].sum(axis=1)
        longest = max(int(lengths.max()), 2)
        arrays: dict[str, Any] = {}
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, np.ndarray):
                # rows are one fewer than tokens
                width = longest - (value.shape[1] < batch.input_ids_BT.shape[1])
                arrays[field.name] = value[first : first + size, :width]
        yield replace(batch, **arrays)


def to_tensors(batch: TopkBatch, device: torch.device | str) -> StudentBatch:
    """Move a batch to `device`, keeping only the rows that count; the label of row i is token i + 1."""
    counted_BP = batch.counted_BP

    def rows_of(column: np.ndarray[Any, Any] | None, dtype: torch.dtype) -> Tensor | None:
        return None if column is None else torch.from_numpy(column[counted_BP]).to(device=device, dtype=dtype)

    rows = {
        "token_ids_PK": rows_of(batch.token_ids_BPK, torch.int64),
        "logprobs_PK": rows_of(batch.logprobs_BPK, torch.float32),
        "log_tail_mass_P": rows_of(batch.log_tail_mass_BP, torch.float32),
        "tail_token_ids_PN": rows_of(batch.tail_token_ids_BPN, torch.int64),
        "entropy_P": rows_of(batch.entropy_BP, torch.float32),
    }
    return StudentBatch(
        input_ids_BT=torch.from_numpy(batch.input_ids_BT).to(device),
        counted_BP=torch.from_numpy(counted_BP).to(device),
        rows=TeacherRows(**rows),  # type: ignore[arg-type]
        labels_R=torch.from_numpy(batch.input_ids_BT[:, 1:][counted_BP]).to(device),
    )
