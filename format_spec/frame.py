"""One frame: a sequence and its rows as compressed byte planes (SPEC 4).

Shapes: L tokens, P = L - 1 rows, K kept entries, N tail samples.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import accumulate, islice, pairwise

import numpy as np
import numpy.typing as npt

from .constants import FRAME_FORMAT, MAX_SEQUENCE_POSITIONS, PAD_CODE
from .errors import CorruptFrame, InvalidRows, LimitExceeded
from .metadata import ShardMetadata
from .planes import PlaneEncoder, Stream, Unsigned
from .profiles import Profile
from .remap import RemapTable
from .rows import PAD_ID, Bool, Float32, Int32, Rows, ScoredSequence

FRAME_HEADER_SIZE = struct.calcsize(FRAME_FORMAT)
LOGPROB_SLACK = 1e-3  # nats above 0 that float32 arithmetic may leave
ID_COLUMNS = ("input_ids", "token_ids", "tail_token_ids")
FLOAT_COLUMNS = ("log_tail_mass", "logsumexp", "entropy")
Columns = Mapping[str, Unsigned]


def to_columns(sequence: ScoredSequence, metadata: ShardMetadata) -> dict[str, Unsigned]:
    """Return the integers of each column, ids not yet remapped.

    Raises:
        InvalidRows: the rows break a rule of SPEC 4 or are not what the metadata says.
        LimitExceeded: the sequence is longer than a frame may be (SPEC 9).
    """
    if len(sequence) > MAX_SEQUENCE_POSITIONS:
        raise LimitExceeded(f"{len(sequence)} tokens are above the limit of {MAX_SEQUENCE_POSITIONS} (SPEC 9)")
    rows = sequence.rows
    if rows.k != metadata.k or rows.tail_samples != metadata.tail_samples:
        # whoever cuts rows on their way here has a better way where they have tail samples
        hint = "; a request's k and min_prob cut before the tail is drawn (SPEC 4.7)" if rows.tail_samples else ""
        raise InvalidRows(
            f"rows have k {rows.k} and {rows.tail_samples} tail samples, "
            f"the shard {metadata.k} and {metadata.tail_samples}{hint}"
        )
    vocab_size, present_P = metadata.fingerprint.vocab_size, ~rows.absent_P
    mask_L = np.ones(len(sequence), np.bool_) if sequence.loss_mask_L is None else sequence.loss_mask_L
    columns: dict[str, Unsigned] = {
        "input_ids": _ids(sequence.input_ids_L, vocab_size, "input ids"),
        "loss_mask": (~mask_L).astype(np.uint8),
        "token_ids": _support(rows, vocab_size),
        "logprobs": _values(rows, metadata.values),
    }
    if metadata.has("segment_ids"):
        columns["segment_ids"] = _segments(sequence)
    elif sequence.segment_ids_L is not None:
        raise InvalidRows("the shard has no column for the segment ids given")
    for name in FLOAT_COLUMNS:
        column = getattr(rows, f"{name}_P")
        if metadata.has(name):
            columns[name] = _floats(column, present_P, name)
    if "entropy" in columns:
        columns["entropy"] = _rounded(columns["entropy"])
    if metadata.tail_samples:
        columns["tail_token_ids"] = _tail(rows, vocab_size)
    return columns


def encode_frame(
    columns: Columns, num_positions: int, metadata: ShardMetadata, table: RemapTable | None, encoder: PlaneEncoder
) -> bytes:
    """Return the frame of a sequence whose columns `to_columns` made."""
    streams: list[bytes] = []
    for column in metadata.columns:
        values = columns[column.name]
        if table is not None and column.name in ID_COLUMNS:
            values = table.encode(values.astype(np.uint32))
        if column.name == "tail_token_ids":
            values = np.sort(values.reshape(-1, metadata.tail_samples), axis=1)
            values[:, 1:] -= values[:, :-1].copy()
        streams += encoder.encode(values, column.planes)
    lengths = np.array([len(stream) for stream in streams], dtype="<u4")
    return struct.pack(FRAME_FORMAT, num_positions, len(streams), 0) + lengths.tobytes() + b"".join(streams)


def split_frame(frame: bytes, metadata: ShardMetadata, num_positions: int) -> dict[str, list[Stream]]:
    """Return the streams of each column of a frame, still compressed.

    Raises:
        CorruptFrame: the frame is not divided as SPEC 4.1 says.
    """
    if len(frame) < FRAME_HEADER_SIZE + 4 * metadata.num_streams:
        raise CorruptFrame(f"a frame of {len(frame)} bytes is too short for its stream lengths (SPEC 4.1)")
    positions, num_streams, reserved = struct.unpack_from(FRAME_FORMAT, frame)
    if positions != num_positions or num_streams != metadata.num_streams or reserved:
        raise CorruptFrame("the frame's counts are not those of index and metadata (SPEC 4.1)")
    lengths = struct.unpack_from(f"<{num_streams}I", frame, FRAME_HEADER_SIZE)
    bounds = list(accumulate(lengths, initial=FRAME_HEADER_SIZE + 4 * num_streams))
    if bounds[-1] != len(frame):
        raise CorruptFrame("the streams do not fill the frame (SPEC 4.1)")
    view = memoryview(frame)
    streams = iter([view[begin:end] for begin, end in pairwise(bounds)])
    return {column.name: list(islice(streams, column.planes)) for column in metadata.columns}


def _ids(ids: Int32, vocab_size: int, what: str) -> Unsigned:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise InvalidRows(f"{what} must lie in 0..{vocab_size - 1}, found {ids.min()}..{ids.max()} (SPEC 4.4)")
    return ids.astype(np.uint32)


def _segments(sequence: ScoredSequence) -> Unsigned:
    segments_L = sequence.segment_ids_L
    if segments_L is None or segments_L.min() < 0 or segments_L.max() >= PAD_CODE:
        raise InvalidRows("segment ids are missing or out of range (SPEC 4.4)")
    return segments_L.astype(np.uint32)


def _support(rows: Rows, vocab_size: int) -> Unsigned:
    pad_PK = rows.token_ids_PK == PAD_ID
    if (pad_PK[:, :-1] & ~pad_PK[:, 1:]).any():
        raise InvalidRows("padding stands before an entry of its row (SPEC 4.4)")
    _ids(rows.token_ids_PK[~pad_PK], vocab_size, "support ids")
    ordered_PK = np.sort(rows.token_ids_PK, axis=1)
    if ((ordered_PK[:, 1:] == ordered_PK[:, :-1]) & (ordered_PK[:, 1:] != PAD_ID)).any():
        raise InvalidRows("a row names a token twice (SPEC 4.4)")
    return np.where(pad_PK, PAD_CODE, rows.token_ids_PK).astype(np.uint32)


def _values(rows: Rows, profile: Profile) -> Unsigned:
    pad_PK, values_PK = rows.token_ids_PK == PAD_ID, rows.logprobs_PK
    kept = values_PK[~pad_PK]
    if not np.isfinite(kept).all() or (kept > LOGPROB_SLACK).any():
        raise InvalidRows("a logprob is not finite or above 0 (SPEC 4.5)")
    codes_PK = profile.encode(np.where(pad_PK, -np.inf, np.minimum(values_PK, 0.0)))
    if (codes_PK[~pad_PK] >= profile.infinity).any():
        raise InvalidRows(f"a logprob of {kept.min()} is below what profile {profile.name} can hold (SPEC 4.5)")
    if (codes_PK[:, 1:] < codes_PK[:, :-1]).any():
        raise InvalidRows("a row is not in probability order (SPEC 4.5)")
    deltas_PK = codes_PK.copy()
    deltas_PK[:, 1:] -= codes_PK[:, :-1]
    return deltas_PK


def _floats(column: Float32 | None, present_P: Bool, name: str) -> Unsigned:
    if column is None:
        raise InvalidRows(f"the shard has a column {name} and the rows have none")
    present = column[present_P]
    if not (allowed := allowed_floats(present, name)).all():
        raise InvalidRows(f"{name} holds {present[~allowed][0]} (SPEC 4.6)")
    # absent rows are never filled with numbers
    return np.where(present_P, column, 0.0).astype("<f4").view("<u4")


def _rounded(bits: Unsigned) -> Unsigned:
    """Round float32 patterns to 16 significant bits: noise would fill a plane, and nothing is computed from it."""
    rounded: Unsigned = (bits + np.uint32(0x7F) + ((bits >> np.uint32(8)) & np.uint32(1))) & np.uint32(0xFFFFFF00)
    if not np.isfinite(rounded.view(np.float32)).all():
        raise InvalidRows("an entropy is rounded to infinity (SPEC 4.6)")
    return rounded


def allowed_floats(values: Float32, name: str) -> npt.NDArray[np.bool_]:
    """Return where a column holds what it may; log tail mass is at most 0, and -inf where there is no tail."""
    allowed: Bool = values <= LOGPROB_SLACK if name == "log_tail_mass" else np.isfinite(values)
    return allowed


def _tail(rows: Rows, vocab_size: int) -> Unsigned:
    tail_PN = rows.tail_token_ids_PN
    assert tail_PN is not None
    none_P = rows.absent_P | (rows.log_tail_mass_P == -np.inf)
    if (tail_PN[none_P] != PAD_ID).any():
        raise InvalidRows("a row without a tail has tail samples (SPEC 4.7)")
    _ids(tail_PN[~none_P], vocab_size, "tail samples")
    return np.where(none_P[:, None], PAD_CODE, tail_PN).astype(np.uint32)
