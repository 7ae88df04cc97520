"""A batch of scored sequences as numpy arrays.

Shapes: B sequences, T tokens of the longest one, P = T - 1 rows, K kept entries, N tail samples.
Sequences are padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..format_spec import PAD_ID, InvalidRows, ScoredSequence, ShardMetadata
from ..format_spec.columns import Array

PAD_SEGMENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class TopkBatch:
    """What a student trains on in one step; row i of a sequence predicts its token i + 1.

    `counted_BP` marks the rows that enter the loss. Padding: token ids 0 with `attention_mask_BT` False,
    segment ids -1, support and tail ids PAD_ID, logprobs and log tail mass -inf, other columns 0; absent
    rows look the same. A sequence that only fills up the batch has no counted row; its first token is
    attended to, since attention over nothing is not a number. `cursor` is where to resume after this batch.
    """

    input_ids_BT: npt.NDArray[np.int64]
    attention_mask_BT: npt.NDArray[np.bool_]
    counted_BP: npt.NDArray[np.bool_]
    token_ids_BPK: npt.NDArray[np.int32]
    logprobs_BPK: npt.NDArray[np.float32]
    log_tail_mass_BP: npt.NDArray[np.float32]
    logsumexp_BP: npt.NDArray[np.float32] | None = None
    entropy_BP: npt.NDArray[np.float32] | None = None
    tail_token_ids_BPN: npt.NDArray[np.int32] | None = None
    segment_ids_BT: npt.NDArray[np.int32] | None = None
    cursor: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.input_ids_BT)


@dataclass(frozen=True, slots=True)
class RowKind:
    """What all sequences of a batch must have in common: the names of their columns, k, and tail samples."""

    columns: frozenset[str]
    k: int
    tail_samples: int

    @classmethod
    def of_sequence(cls, sequence: ScoredSequence) -> RowKind:
        """Return the kind of a sequence in memory."""
        return cls(frozenset(_given(sequence)), sequence.rows.k, sequence.rows.tail_samples)

    @classmethod
    def of_shard(cls, metadata: ShardMetadata) -> RowKind:
        """Return the kind of a shard's sequences."""
        names = frozenset(column.name for column in metadata.columns if column.is_known)
        return cls(names, metadata.k, metadata.tail_samples)

    def check(self, others: Iterable[RowKind]) -> None:
        """Raise InvalidRows where another is of another kind."""
        for other in others:
            if (found := (other.k, other.tail_samples)) != (self.k, self.tail_samples):
                raise InvalidRows(f"rows with (k, tail samples) {found} in a batch of {(self.k, self.tail_samples)}")
            if different := sorted(self.columns ^ other.columns):
                raise InvalidRows(f"some sequences of the batch have {', '.join(different)}, others have not")


def new_batch(
    kind: RowKind, lengths: Sequence[int], *, batch_size: int | None = None, cursor: int = 0, epoch: int = 0
) -> TopkBatch:
    """Return a batch for sequences of these lengths, in tokens, filled up to `batch_size` with padding.

    The columns of each sequence are then written into what `columns_of` returns, and `settle` does the rest.
    """
    B, T = max(batch_size or 0, len(lengths)), max(lengths, default=2)
    P, K, N = T - 1, kind.k, kind.tail_samples
    batch = TopkBatch(
        input_ids_BT=np.zeros((B, T), np.int64),
        attention_mask_BT=np.zeros((B, T), np.bool_),
        counted_BP=np.zeros((B, P), np.bool_),
        token_ids_BPK=np.empty((B, P, K), np.int32),
        logprobs_BPK=np.empty((B, P, K), np.float32),
        log_tail_mass_BP=np.empty((B, P), np.float32),
        logsumexp_BP=np.empty((B, P), np.float32) if "logsumexp" in kind.columns else None,
        entropy_BP=np.empty((B, P), np.float32) if "entropy" in kind.columns else None,
        tail_token_ids_BPN=np.empty((B, P, N), np.int32) if N else None,
        segment_ids_BT=np.full((B, T), PAD_SEGMENT, np.int32) if "segment_ids" in kind.columns else None,
        cursor=cursor,
        epoch=epoch,
    )
    for array, padding in _rows(batch).values():
        array[len(lengths) :] = padding
        for b, length in enumerate(lengths):
            array[b, length - 1 :] = padding
    batch.attention_mask_BT[len(lengths) :, 0] = True
    return batch


def columns_of(batch: TopkBatch, b: int, length: int) -> dict[str, Array]:
    """Return the arrays, by the names of the columns, that sequence `b` of `length` tokens is to be written into."""
    columns = {name: array[b, : length - 1] for name, (array, _) in _rows(batch).items()}
    if batch.segment_ids_BT is not None:
        columns["segment_ids"] = batch.segment_ids_BT[b, :length]
    # the batch holds these otherwise than shards do
    return columns | {"input_ids": np.empty(length, np.int32), "loss_mask": np.empty(length, np.bool_)}


def settle(batch: TopkBatch, b: int, columns: Mapping[str, Array]) -> None:
    """Finish sequence `b`, whose columns have been written; what absent rows hold means nothing and becomes padding."""
    length = len(columns["input_ids"])
    batch.input_ids_BT[b, :length] = columns["input_ids"]
    batch.attention_mask_BT[b, :length] = True
    absent_P = columns["token_ids"][:, 0] == PAD_ID
    batch.counted_BP[b, : length - 1] = columns["loss_mask"][1:] & ~absent_P
    if absent_P.any():
        for name, (_, padding) in _rows(batch).items():
            columns[name][absent_P] = padding


def collate(
    sequences: Sequence[ScoredSequence],
    *,
    batch_size: int | None = None,
    like: ScoredSequence | None = None,
    cursor: int = 0,
    epoch: int = 0,
) -> TopkBatch:
    """Return a batch of `sequences`, filled up to `batch_size` with sequences in which nothing counts.

    Without any sequence, `like` says which columns and how many entries the rows have.

    Raises:
        InvalidRows: nothing to say the columns, or sequences with different ones.
    """
    first = sequences[0] if sequences else like
    if first is None:
        raise InvalidRows("a batch needs at least one sequence")
    kind = RowKind.of_sequence(first)
    kind.check(map(RowKind.of_sequence, sequences))
    batch = new_batch(kind, [len(s) for s in sequences], batch_size=batch_size, cursor=cursor, epoch=epoch)
    for b, sequence in enumerate(sequences):
        columns, given = columns_of(batch, b, len(sequence)), _given(sequence)
        for name, column in columns.items():
            column[...] = given[name]
        settle(batch, b, columns)
    return batch


def _rows(batch: TopkBatch) -> dict[str, tuple[Array, float]]:
    """Return the arrays of rows by the names of their columns, and their padding."""
    rows = {
        "token_ids": (batch.token_ids_BPK, PAD_ID),
        "logprobs": (batch.logprobs_BPK, -np.inf),
        "log_tail_mass": (batch.log_tail_mass_BP, -np.inf),
        "logsumexp": (batch.logsumexp_BP, 0.0),
        "entropy": (batch.entropy_BP, 0.0),
        "tail_token_ids": (batch.tail_token_ids_BPN, PAD_ID),
    }
    return {name: (array, padding) for name, (array, padding) in rows.items() if array is not None}


def _given(sequence: ScoredSequence) -> dict[str, Any]:
    """Return the columns of a sequence in memory; all of it is marked where it has no loss mask."""
    rows, mask_L = sequence.rows, sequence.loss_mask_L
    columns = {
        "input_ids": sequence.input_ids_L,
        "loss_mask": np.True_ if mask_L is None else mask_L,
        "segment_ids": sequence.segment_ids_L,
        "token_ids": rows.token_ids_PK,
        "logprobs": rows.logprobs_PK,
        "log_tail_mass": rows.log_tail_mass_P,
        "logsumexp": rows.logsumexp_P,
        "entropy": rows.entropy_P,
        "tail_token_ids": rows.tail_token_ids_PN,
    }
    return {name: column for name, column in columns.items() if column is not None}
