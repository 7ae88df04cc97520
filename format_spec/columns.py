"""Columns in memory, under their names in a shard: new arrays, and those of the caller that a sequence is read into."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .constants import MAX_PLANE_BYTES
from .errors import ColumnError, LimitExceeded
from .metadata import ShardMetadata
from .rows import PAD_ID

Array = npt.NDArray[Any]

# the type of a column's values, and what stands where nothing can be believed
TYPES: dict[str, tuple[Any, Any]] = {
    "input_ids": (np.int32, PAD_ID),
    "loss_mask": (np.bool_, False),
    "segment_ids": (np.int32, PAD_ID),
    "token_ids": (np.int32, PAD_ID),
    "logprobs": (np.float32, -np.inf),
    "log_tail_mass": (np.float32, np.nan),
    "logsumexp": (np.float32, np.nan),
    "entropy": (np.float32, np.nan),
    "tail_token_ids": (np.int32, PAD_ID),
}


def new_columns(names: Iterable[str], metadata: ShardMetadata, num_positions: int) -> dict[str, Array]:
    """Return arrays, of any content, for these columns of a sequence.

    Raises:
        ColumnError: the shard has no such column.
        LimitExceeded: a column is larger than it may be (SPEC 9).
    """
    # no memory is taken before all limits are checked
    shapes = {name: _shape(name, metadata, num_positions) for name in names}
    return {name: np.empty(shape, TYPES[name][0]) for name, shape in shapes.items()}


def check_columns(columns: Mapping[str, Array], metadata: ShardMetadata, num_positions: int) -> None:
    """Check that a sequence can be read into these arrays.

    Raises:
        ColumnError: the shard has no such column, or an array has another shape or type, or is read-only.
    """
    for name, array in columns.items():
        due = _shape(name, metadata, num_positions), np.dtype(TYPES[name][0])
        if (array.shape, array.dtype) != due:
            raise ColumnError(f"column {name} needs an array of {due[1]} {due[0]}, not of {array.dtype} {array.shape}")
        if not array.flags.writeable:
            raise ColumnError(f"the array given for column {name} is read-only")


def blank(columns: Mapping[str, Array]) -> None:
    """Overwrite arrays so that nothing of what was read into them is believed: ids are PAD_ID, all rows absent."""
    for name, array in columns.items():
        array[...] = TYPES[name][1]


def _shape(name: str, metadata: ShardMetadata, num_positions: int) -> tuple[int, ...]:
    if name not in TYPES or not metadata.has(name):
        known = [column.name for column in metadata.columns if column.is_known]
        raise ColumnError(f"the shard has no column {name!r} to read; it has {', '.join(known)}")
    shape = metadata.shape(name, num_positions)
    if (entries := math.prod(shape)) > MAX_PLANE_BYTES:
        raise LimitExceeded(f"a plane of {entries} bytes is above the limit of {MAX_PLANE_BYTES} (SPEC 9)")
    return shape
