"""Decoding frames: into arrays that are given, and only the columns that are asked for (SPEC 4).

Shapes: L tokens, P = L - 1 rows, K kept entries, N tail samples. A mask is None where it would hold nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from .columns import Array
from .constants import PAD_CODE
from .errors import CorruptFrame
from .frame import FLOAT_COLUMNS, allowed_floats, split_frame
from .metadata import ShardMetadata
from .planes import PlaneDecoder, Stream, Unsigned
from .remap import RemapTable
from .rows import PAD_ID, Bool

# below this a code's highest byte is not that of padding
TELLING_VOCAB = PAD_CODE & 0xFF0000
# so many differences below 2^24 add up to less than 2^32
MAX_NARROW_SUMS = 256


class FrameDecoder:
    """Decodes the frames of one shard; not shared between threads.

    Raises:
        CorruptFrame: what a frame holds breaks a rule of SPEC 4.
        LimitExceeded: a declared size is above its limit (SPEC 9).
    """

    def __init__(self, metadata: ShardMetadata, table: RemapTable | None) -> None:
        self._metadata, self._table = metadata, table
        self._vocab_size = metadata.fingerprint.vocab_size
        self._planes = PlaneDecoder()

    def decode(self, frame: bytes, num_positions: int, columns: Mapping[str, Array]) -> None:
        """Write these columns of a frame; others are not decompressed, and rules that name one are not checked.

        The arrays have the shapes and types of `columns.new_columns`. What an error leaves in them means nothing.
        """
        parts = split_frame(frame, self._metadata, num_positions)
        if "input_ids" in columns:
            self._input_ids(parts, num_positions, columns["input_ids"])
        if "loss_mask" in columns:
            self._loss_mask(parts, num_positions, columns["loss_mask"])
        if "segment_ids" in columns:
            self._segment_ids(parts, num_positions, columns["segment_ids"])
        pad_PK = self._support(parts, num_positions, columns)
        floats = [name for name in FLOAT_COLUMNS if name in columns]
        if floats:
            absent_P = self._absent(parts, num_positions) if "token_ids" not in columns else _first(pad_PK)
            for name in floats:
                self._floats(parts, name, num_positions, absent_P, columns[name])
        if "tail_token_ids" in columns:
            self._tail(parts, num_positions, columns)

    def _integers(
        self, parts: Mapping[str, list[Stream]], name: str, num_positions: int, dtype: type = np.uint32
    ) -> Unsigned:
        shape = self._metadata.shape(name, num_positions)
        return self._planes.decode(parts[name], math.prod(shape), dtype).reshape(shape)

    def _ids(self, codes: npt.NDArray[np.integer], out: Array) -> None:
        """Write the ids of codes, which are below the vocabulary size or padding."""
        if self._table is not None:
            self._table.decode(codes, out)
        else:
            out[...] = codes
            out[out == PAD_CODE] = PAD_ID

    def _input_ids(self, parts: Mapping[str, list[Stream]], num_positions: int, out: Array) -> None:
        codes_L = self._integers(parts, "input_ids", num_positions)
        if codes_L.max() >= self._vocab_size:
            raise CorruptFrame("an input id is outside the vocabulary (SPEC 4.4)")
        self._ids(codes_L, out)

    def _loss_mask(self, parts: Mapping[str, list[Stream]], num_positions: int, out: Array) -> None:
        mask_L = self._integers(parts, "loss_mask", num_positions, np.uint8)
        if mask_L.max() > 1:
            raise CorruptFrame("the loss mask holds other bytes than 0 and 1 (SPEC 4.4)")
        np.equal(mask_L, 0, out=out)

    def _segment_ids(self, parts: Mapping[str, list[Stream]], num_positions: int, out: Array) -> None:
        segments_L = self._integers(parts, "segment_ids", num_positions)
        if segments_L.max() >= PAD_CODE:
            raise CorruptFrame(f"a segment id is not below {PAD_CODE} (SPEC 4.4)")
        out[...] = segments_L

    def _support(
        self, parts: Mapping[str, list[Stream]], num_positions: int, columns: Mapping[str, Array]
    ) -> Bool | None:
        """Write the ids and logprobs that are asked for; return where the ids are padding."""
        pad_PK = infinite_PK = None
        if "token_ids" in columns:
            pad_PK = self._token_ids(parts, num_positions, columns["token_ids"])
        if "logprobs" in columns:
            infinite_PK = self._logprobs(parts, num_positions, columns["logprobs"])
        if "token_ids" in columns and "logprobs" in columns and not _same(pad_PK, infinite_PK):
            raise CorruptFrame("values and ids are padded in different places (SPEC 4.5)")
        return pad_PK

    def _token_ids(self, parts: Mapping[str, list[Stream]], num_positions: int, out: Array) -> Bool | None:
        codes_PK = self._integers(parts, "token_ids", num_positions)
        self._ids(codes_PK, out)
        # whole rows are the rule: one look at the largest code spares them the care that padding needs
        if codes_PK.max() < self._vocab_size:
            return None
        pad_PK: Bool = codes_PK == PAD_CODE
        if ((codes_PK >= self._vocab_size) & ~pad_PK).any():
            raise CorruptFrame("a support id is outside the vocabulary (SPEC 4.4)")
        if (pad_PK[:, :-1] & ~pad_PK[:, 1:]).any():
            raise CorruptFrame("padding stands before an entry of its row (SPEC 4.4)")
        return pad_PK

    def _logprobs(self, parts: Mapping[str, list[Stream]], num_positions: int, out: Array) -> Bool | None:
        """Write the logprobs; return where they are those of padding."""
        profile = self._metadata.values
        deltas_PK = self._integers(parts, "logprobs", num_positions, np.uint16)
        codes_PK = np.add.accumulate(deltas_PK, axis=1, dtype=np.uint16)
        if (codes_PK[:, 1:] < codes_PK[:, :-1]).any():
            raise CorruptFrame("a row is not in probability order (SPEC 4.5)")
        largest = codes_PK[:, -1].max()
        if largest > profile.infinity:
            raise CorruptFrame("a value is no number (SPEC 4.5)")
        profile.decode(codes_PK, out)
        return codes_PK == profile.infinity if largest == profile.infinity else None

    def _absent(self, parts: Mapping[str, list[Stream]], num_positions: int) -> Bool | None:
        """Find the absent rows in as few planes of `token_ids` as tell them."""
        skipped = 2 if self._vocab_size <= TELLING_VOCAB else 0
        shape = self._metadata.shape("token_ids", num_positions)
        codes_PK = self._planes.decode(parts["token_ids"][skipped:], math.prod(shape), np.uint32).reshape(shape)
        absent_P: Bool = codes_PK[:, 0] == PAD_CODE >> 8 * skipped
        return absent_P if absent_P.any() else None

    def _floats(
        self, parts: Mapping[str, list[Stream]], name: str, num_positions: int, absent_P: Bool | None, out: Array
    ) -> None:
        bits_P = self._integers(parts, name, num_positions)
        if absent_P is not None and bits_P[absent_P].any():
            raise CorruptFrame(f"{name} of an absent row is not zero (SPEC 4.6)")
        values_P = bits_P.view(np.float32)
        if not (allowed_P := allowed_floats(values_P, name)).all():
            raise CorruptFrame(f"{name} holds {values_P[~allowed_P][0]} (SPEC 4.6)")
        out[...] = values_P
        if absent_P is not None:
            out[absent_P] = np.nan

    def _tail(self, parts: Mapping[str, list[Stream]], num_positions: int, columns: Mapping[str, Array]) -> None:
        out, wide = columns["tail_token_ids"], self._metadata.tail_samples > MAX_NARROW_SUMS
        deltas_PN = self._integers(parts, "tail_token_ids", num_positions)
        codes_PN = np.add.accumulate(deltas_PN, axis=1, dtype=np.int64 if wide else np.uint32)
        # sums do not overflow, so they ascend: the last is the largest
        none_P, last_P = codes_PN[:, 0] == PAD_CODE, codes_PN[:, -1]
        if (last_P >= np.where(none_P, PAD_CODE + 1, self._vocab_size)).any():
            raise CorruptFrame("a tail sample is outside the vocabulary (SPEC 4.7)")
        # the log tail mass of an absent row has been read as NaN
        if "log_tail_mass" in columns and (none_P != ~(columns["log_tail_mass"] > -np.inf)).any():
            raise CorruptFrame("a row without a tail has tail samples, or one with a tail has none (SPEC 4.7)")
        self._ids(codes_PN, out)
        if self._table is not None:
            # ascending by id, as an engine gives them, whatever the table
            out.sort(axis=1)


def _first(pad_PK: Bool | None) -> Bool | None:
    """Return the rows without any entry."""
    if pad_PK is None or not pad_PK[:, 0].any():
        return None
    absent_P: Bool = pad_PK[:, 0]
    return absent_P


def _same(one_PK: Bool | None, other_PK: Bool | None) -> bool:
    return bool((one_PK == other_PK).all()) if one_PK is not None and other_PK is not None else one_PK is other_PK
