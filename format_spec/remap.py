"""The remap table: token ids coded by how often a shard holds them, so that common ones have small codes (SPEC 5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from .constants import PAD_CODE
from .rows import PAD_ID, Int32

UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]
BLOCK = 1 << 20


def frequency_classes(columns: Iterable[npt.NDArray[np.unsignedinteger]], vocab_size: int) -> UInt8:
    """Return the class of each id of the vocabulary: 0 where it never occurs, else 1 + floor(log2(occurrences))."""
    counts = np.zeros(vocab_size, np.int64)
    for block in _blocks(columns):
        counts += np.bincount(block[block != PAD_CODE], minlength=vocab_size)
    # frexp's exponent is exact where log2 may round up
    classes: UInt8 = np.where(counts > 0, np.frexp(counts.astype(np.float64))[1], 0).astype(np.uint8)
    return classes


def _blocks(columns: Iterable[npt.NDArray[np.unsignedinteger]]) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Join columns, for a count costs as much as the vocabulary is large."""
    held: list[npt.NDArray[np.unsignedinteger]] = []
    for column in columns:
        held.append(column.reshape(-1))
        if sum(map(len, held)) >= BLOCK:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


class RemapTable:
    """Codes of ids: descending by class, ascending by id inside a class."""

    def __init__(self, classes: UInt8) -> None:
        self.classes = classes
        ids = np.argsort(~classes, kind="stable").astype(np.int32)
        # what is no code is clipped to the last place
        self._id_of = np.append(ids, np.int32(PAD_ID))
        self._code_of: UInt32 | None = None

    def encode(self, ids: UInt32) -> UInt32:
        """Return the codes of ids; padding stays padding."""
        last = len(self.classes) - 1
        if self._code_of is None:
            self._code_of = np.empty(len(self.classes), np.uint32)
            self._code_of[self._id_of[:-1]] = np.arange(len(self.classes), dtype=np.uint32)
        return np.where(ids == PAD_CODE, np.uint32(PAD_CODE), self._code_of[np.minimum(ids, np.uint32(last))])

    def decode(self, codes: npt.NDArray[np.integer], out: Int32 | None = None) -> Int32:
        """Return the ids of codes, into `out` where given; PAD_ID for a code that is not below the vocabulary size."""
        return self._id_of.take(codes, mode="clip", out=out)
