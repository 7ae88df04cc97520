"""A batch of scored sequences as numpy arrays.

Shapes: B sequences, T tokens of the longest one, P = T - 1 rows, K kept entries, N tail samples.
Sequences are padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..format_spec import PAD_ID, InvalidRows, ScoredSequence

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
    rows = first.rows
    B, T = max(batch_size or 0, len(sequences)), max((len(s) for s in sequences), default=2)
    P, K, N = T - 1, rows.k, rows.tail_samples
    batch = TopkBatch(
        input_ids_BT=np.zeros((B, T), np.int64),
        attention_mask_BT=np.zeros((B, T), np.bool_),
        counted_BP=np.zeros((B, P), np.bool_),
        token_ids_BPK=np.full((B, P, K), PAD_ID, np.int32),
        logprobs_BPK=np.full((B, P, K), -np.inf, np.float32),
        log_tail_mass_BP=np.full((B, P), -np.inf, np.float32),
        logsumexp_BP=None if rows.logsumexp_P is None else np.zeros((B, P), np.float32),
        entropy_BP=None if rows.entropy_P is None else np.zeros((B, P), np.float32),
        tail_token_ids_BPN=np.full((B, P, N), PAD_ID, np.int32) if N else None,
        segment_ids_BT=None if first.segment_ids_L is None else np.full((B, T), PAD_SEGMENT, np.int32),
        cursor=cursor,
        epoch=epoch,
    )
    for b, sequence in enumerate(sequences):
        if (found := (sequence.rows.k, sequence.rows.tail_samples)) != (K, N):
            raise InvalidRows(f"rows with (k, tail samples) {found} in a batch of {(K, N)}")
        _fill(batch, b, sequence)
    batch.attention_mask_BT[len(sequences) :, 0] = True
    return batch


def _fill(batch: TopkBatch, b: int, sequence: ScoredSequence) -> None:
    """Write a sequence into the batch; what absent rows hold means nothing, so they stay padding."""
    L, rows = len(sequence), sequence.rows
    absent_P = rows.absent_P
    present = np.flatnonzero(~absent_P) if absent_P.any() else slice(0, L - 1)
    batch.input_ids_BT[b, :L] = sequence.input_ids_L
    batch.attention_mask_BT[b, :L] = True
    batch.counted_BP[b, : L - 1] = sequence.counted_P
    batch.token_ids_BPK[b, present] = rows.token_ids_PK[present]
    batch.logprobs_BPK[b, present] = rows.logprobs_PK[present]
    batch.log_tail_mass_BP[b, present] = rows.log_tail_mass_P[present]
    for name, target, column, filled in (
        ("logsumexp", batch.logsumexp_BP, rows.logsumexp_P, present),
        ("entropy", batch.entropy_BP, rows.entropy_P, present),
        ("tail_token_ids", batch.tail_token_ids_BPN, rows.tail_token_ids_PN, present),
        ("segment_ids", batch.segment_ids_BT, sequence.segment_ids_L, slice(0, L)),
    ):
        if target is not None and column is not None:
            target[b, filled] = column[filled]
        elif target is not None or column is not None:
            raise InvalidRows(f"some sequences of the batch have {name}, others have not")
