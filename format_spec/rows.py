"""Rows in memory: what the teacher said at each position of a sequence.

Shapes: L tokens of a sequence, P = L - 1 rows, K kept entries, N tail samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from .digest import content_key
from .errors import InvalidRows

PAD_ID = -1

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The teacher's distributions at P positions.

    `token_ids_PK` is in probability order (logprob descending, the teacher's ties by id ascending) and ends
    in PAD_ID where a row has fewer than K entries; `logprobs_PK` (nats) is -inf there. A row without any
    entry is absent: the teacher gave nothing usable, and its other columns mean nothing.
    `log_tail_mass_P` is the log of the probability outside the support, -inf for none. `tail_token_ids_PN`
    holds ids drawn from the tail, each standing for 1/N of it, ascending when read; all PAD_ID where the tail is empty.
    `entropy_P` is of the full distribution, in nats.
    """

    token_ids_PK: Int32
    logprobs_PK: Float32
    log_tail_mass_P: Float32
    logsumexp_P: Float32 | None = None
    entropy_P: Float32 | None = None
    tail_token_ids_PN: Int32 | None = None

    def __post_init__(self) -> None:
        shape = self.token_ids_PK.shape
        if len(shape) != 2 or shape[1] < 1 or self.logprobs_PK.shape != shape:
            raise InvalidRows(f"token ids {shape} and logprobs {self.logprobs_PK.shape} must both be [rows, k >= 1]")
        for name in ("log_tail_mass_P", "logsumexp_P", "entropy_P"):
            column = getattr(self, name)
            if column is not None and column.shape != shape[:1]:
                raise InvalidRows(f"{name} has shape {column.shape}, not ({shape[0]},)")
        tail = self.tail_token_ids_PN
        if tail is not None and (tail.ndim != 2 or tail.shape[0] != shape[0] or tail.shape[1] < 1):
            raise InvalidRows(f"tail samples have shape {tail.shape}, not ({shape[0]}, n >= 1)")
        if tail is not None and self.entropy_P is None:
            raise InvalidRows("rows with tail samples need the entropy of each row")

    def __len__(self) -> int:
        return int(self.token_ids_PK.shape[0])

    def __getitem__(self, positions: slice) -> Rows:
        columns: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            column = getattr(self, name)
            columns[name] = None if column is None else column[positions]
        return Rows(**columns)

    @classmethod
    def concatenate(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts, which must be at least one and have the same columns."""
        columns: dict[str, Any] = {}
        for name in (field.name for field in fields(cls)):
            arrays = [getattr(part, name) for part in parts]
            if len({None if array is None else array.shape[1:] for array in arrays}) != 1:
                raise InvalidRows(f"cannot concatenate rows whose {name} differ in kind")
            columns[name] = None if arrays[0] is None else np.concatenate(arrays)
        return cls(**columns)

    @property
    def k(self) -> int:
        """Entries that a row can hold."""
        return int(self.token_ids_PK.shape[1])

    @property
    def tail_samples(self) -> int:
        """Tail samples that each row has; 0 for plain top-k."""
        return 0 if self.tail_token_ids_PN is None else int(self.tail_token_ids_PN.shape[1])

    @property
    def absent_P(self) -> Bool:
        """Rows that the teacher could not give."""
        absent: Bool = self.token_ids_PK[:, 0] == PAD_ID
        return absent


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSequence:
    """One token sequence and its L - 1 rows; row i predicts token i + 1.

    `loss_mask_L[i]` marks token i: row i counts when `loss_mask_L[i + 1]` is set. `segment_ids_L` tells
    texts apart that are packed into one sequence.
    """

    input_ids_L: Int32
    rows: Rows
    loss_mask_L: Bool | None = None
    segment_ids_L: Int32 | None = None

    def __post_init__(self) -> None:
        length = len(self.input_ids_L)
        if self.input_ids_L.ndim != 1 or length < 2:
            raise InvalidRows(f"a sequence of {length} tokens has no row; at least 2 tokens are needed")
        if len(self.rows) != length - 1:
            raise InvalidRows(f"{length} tokens need {length - 1} rows, not {len(self.rows)}")
        for name in ("loss_mask_L", "segment_ids_L"):
            column = getattr(self, name)
            if column is not None and column.shape != (length,):
                raise InvalidRows(f"{name} has shape {column.shape}, not ({length},)")

    def __len__(self) -> int:
        return len(self.input_ids_L)

    @property
    def key(self) -> bytes:
        """The sequence's content key, 32 bytes."""
        return content_key(self.input_ids_L)

    @property
    def counted_P(self) -> Bool:
        """Rows that enter a loss: their target token is marked and the row is not absent."""
        present = ~self.rows.absent_P
        return present if self.loss_mask_L is None else present & self.loss_mask_L[1:]
