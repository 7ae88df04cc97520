"""Rows as Arrow columns, one record a sequence of n tokens; what `export` writes and `import` reads.

| column | type | |
|---|---|---|
| input_ids, segment_ids | list<int32> | n tokens, and the text each belongs to |
| loss_mask | list<bool> | n; entry i marks token i |
| token_ids | list<list<int32>> | n - 1 supports, most probable first; empty where the row is absent |
| logprobs | list<list<float>> | n - 1, as long as the supports, nats |
| log_tail_mass, logsumexp, entropy | list<float> | n - 1; null where the row is absent |
| tail_token_ids | list<list<int32>> | n - 1; empty where there is no tail |

Row i is the distribution after token i. Lists end where entries do: there is no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .metadata import COLUMNS, ShardMetadata
from .rows import PAD_ID, Int32, Rows, ScoredSequence

if TYPE_CHECKING:
    import pyarrow as pa

FLOATS = ("log_tail_mass", "logsumexp", "entropy")
MATRICES = ("token_ids", "logprobs", "tail_token_ids")


def arrow_schema(metadata: ShardMetadata, notes: dict[str, str]) -> pa.Schema:
    """Return the schema for shards with this metadata; `notes` become the schema's own metadata."""
    import pyarrow as pa

    items = {"loss_mask": pa.bool_(), "logprobs": pa.float32()} | dict.fromkeys(FLOATS, pa.float32())
    lists = {name: pa.list_(items.get(name, pa.int32())) for name in COLUMNS}
    types = {name: pa.list_(kind) if name in MATRICES else kind for name, kind in lists.items()}
    return pa.schema([(name, types[name]) for name in COLUMNS if metadata.has(name)], metadata=notes)


def to_batch(sequences: Sequence[ScoredSequence], schema: pa.Schema) -> pa.RecordBatch:
    """Return a record for each sequence; their supports together must hold fewer than 2^31 entries."""
    import pyarrow as pa

    return pa.record_batch([_column(name, sequences) for name in schema.names], schema=schema)


def _column(name: str, sequences: Sequence[ScoredSequence]) -> pa.ListArray:
    import pyarrow as pa

    rows = [sequence.rows for sequence in sequences]
    if name in FLOATS:
        parts = [getattr(part, f"{name}_P") for part in rows]
        absent = np.concatenate([part.absent_P for part in rows])
        return _lists([len(part) for part in rows], pa.array(np.concatenate(parts), mask=absent))
    if name in MATRICES:
        kept = [_ids(name, part) != PAD_ID for part in rows]
        parts = [_matrix(name, part)[mask] for part, mask in zip(rows, kept, strict=True)]
        widths = np.concatenate([mask.sum(axis=1) for mask in kept])
        return _lists([len(part) for part in rows], _lists(widths, pa.array(np.concatenate(parts))))
    parts = [_tokens(name, sequence) for sequence in sequences]
    return _lists([len(part) for part in parts], pa.array(np.concatenate(parts)))


def _lists(lengths: npt.ArrayLike, values: pa.Array) -> pa.ListArray:
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _tokens(name: str, sequence: ScoredSequence) -> npt.NDArray[Any]:
    values = getattr(sequence, f"{name}_L")
    # shards store a mask always, sequences in memory may leave it out
    return np.ones(len(sequence), np.bool_) if values is None and name == "loss_mask" else values


def _matrix(name: str, rows: Rows) -> npt.NDArray[Any]:
    matrix: npt.NDArray[Any] = rows.logprobs_PK if name == "logprobs" else _ids(name, rows)
    return matrix


def _ids(name: str, rows: Rows) -> Int32:
    if name != "tail_token_ids":
        return rows.token_ids_PK
    assert rows.tail_token_ids_PN is not None
    return rows.tail_token_ids_PN
