"""Rows as the two arrays that travel from vLLM's workers to us.

Shapes: P positions, K kept entries, N tail samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....format_spec import Rows
from ..capture_columns import Columns
from ..errors import EngineError

# log tail mass, logsumexp, entropy
NUM_FLOATS = 3


def pack(columns: Columns) -> tuple[Tensor, Tensor]:
    """Return ids [P, K + N] and floats [P, K + 3], on the columns' device."""
    draws_PN = columns.tail_token_ids_PN
    ids = columns.token_ids_PK if draws_PN is None else torch.cat([columns.token_ids_PK, draws_PN], 1)
    singles = [columns.log_tail_mass_P, columns.logsumexp_P, columns.entropy_P]
    return ids, torch.cat([columns.logprobs_PK, torch.stack(singles, 1)], 1)


def pack_failure(error: str) -> tuple[Tensor, Tensor]:
    """Return what stands for rows that could not be made: a text, and no floats."""
    return torch.frombuffer(bytearray(error.encode() or b"?"), dtype=torch.uint8).int()[None], torch.empty(0, 0)


def unpack(ids: npt.NDArray[Any], floats: npt.NDArray[Any], *, num_rows: int, k: int, tail_samples: int) -> Rows:
    """Return the rows, which own their memory.

    Raises:
        EngineError: the worker could not make them, or made others than were asked for.
    """
    if floats.shape == (0, 0):
        text = bytes(ids.astype(np.uint8).ravel()).decode(errors="replace")
        raise EngineError(f"the capture of rows failed in vLLM's worker: {text}")
    if ids.shape != (num_rows, k + tail_samples) or floats.shape != (num_rows, k + NUM_FLOATS):
        raise EngineError(
            f"vLLM gave {ids.shape} ids and {floats.shape} floats for {num_rows} rows of {k} entries and "
            f"{tail_samples} tail samples"
        )
    columns = np.ascontiguousarray(floats[:, k:].T, dtype=np.float32)
    return Rows(
        token_ids_PK=np.array(ids[:, :k], np.int32),
        logprobs_PK=np.array(floats[:, :k], np.float32),
        log_tail_mass_P=columns[0],
        logsumexp_P=columns[1],
        entropy_P=columns[2],
        tail_token_ids_PN=np.array(ids[:, k:], np.int32) if tail_samples else None,
    )
