"""The remap table: token ids coded by how often a shard holds them, so that common ones have small codes (SPEC 5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from .constants import PAD_CODE

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
        self.id_of = np.argsort(-classes.astype(np.int16), kind="stable").astype(np.uint32)
        self._code_of: UInt32 | None = None

    def encode(self, ids: UInt32) -> UInt32:
        """Return the codes of ids; padding stays padding."""
        if self._code_of is None:
            self._code_of = np.empty(len(self.id_of), np.uint32)
            self._code_of[self.id_of] = np.arange(len(self.id_of), dtype=np.uint32)
        last = np.uint32(len(self.id_of) - 1)
        return np.where(ids == PAD_CODE, np.uint32(PAD_CODE), self._code_of[np.minimum(ids, last)])

    def decode(self, codes: UInt32) -> UInt32:
        """Return the ids of codes, which must be below the vocabulary size."""
        return self.id_of[codes]
