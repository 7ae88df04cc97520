"""Token sequences on their way into a teacher: what can be scored, and in which batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...format_spec import Code
from .errors import UnscorableSequence

# part of the fingerprint: raise it when the same list would fall into other batches
BATCHING_VERSION = 1

Ids = npt.NDArray[np.integer[Any]]


def check_sequences(sequences: Sequence[Ids], *, num_embeddings: int, max_length: int) -> None:
    """Refuse a sequence without a row, one that is too long, and token ids that the teacher has no embedding for.

    Raises:
        UnscorableSequence: names the first such sequence.
    """
    for index, ids in enumerate(sequences):
        if ids.ndim != 1 or len(ids) < 2:
            message = f"sequence {index} has shape {ids.shape}; at least 2 tokens are needed"
            raise UnscorableSequence(message, Code.SEQUENCE_TOO_SHORT, index)
        if len(ids) > max_length:
            message = f"sequence {index} has {len(ids)} tokens, the teacher takes at most {max_length}"
            raise UnscorableSequence(message, Code.SEQUENCE_TOO_LONG, index)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num_embeddings:
            wrong = low if low < 0 else high
            message = f"sequence {index} holds token id {wrong}, outside the teacher's 0 .. {num_embeddings - 1}"
            raise UnscorableSequence(message, Code.TOKEN_OUT_OF_VOCABULARY, index)


def plan_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of the sequences of each batch, from short to long, equal lengths in the given order.

    A batch holds at most `max_tokens` tokens once padded to its longest sequence, and at least one sequence.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def pad_batch(sequences: Sequence[Ids]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return input ids and attention mask, both [sequences, longest], padded on the right."""
    shape = len(sequences), max(map(len, sequences))
    input_ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    return input_ids, mask
