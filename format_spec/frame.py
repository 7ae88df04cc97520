"""One frame: a sequence and its rows as compressed byte planes (SPEC 5).

Shapes: L tokens, P = L - 1 rows, K kept entries, N tail samples.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from .constants import FRAME_FORMAT, MAX_SEQUENCE_POSITIONS, PAD_CODE, PAD_VALUE
from .errors import CorruptFrame, InvalidRows, LimitExceeded
from .header import COLUMNS, ShardHeader
from .planes import PlaneEncoder, UInt32, decode_planes
from .rows import PAD_ID, Bool, Float32, Int32, Rows, ScoredSequence

FRAME_HEADER_SIZE = struct.calcsize(FRAME_FORMAT)
LOGPROB_SLACK = 1e-3  # nats above 0 that float32 arithmetic may leave


def encode_frame(sequence: ScoredSequence, header: ShardHeader, encoder: PlaneEncoder) -> bytes:
    """Return the frame of a sequence.

    Raises:
        InvalidRows: the rows break a rule of SPEC 5 or are not what the header says.
        LimitExceeded: the sequence is longer than a frame may be (SPEC 8).
    """
    if len(sequence) > MAX_SEQUENCE_POSITIONS:
        raise LimitExceeded(f"{len(sequence)} tokens are above the limit of {MAX_SEQUENCE_POSITIONS} (SPEC 8)")
    columns = _columns(sequence, header)
    streams: list[bytes] = []
    for name in header.columns:
        streams += encoder.encode(columns[name], COLUMNS[name][0])
    lengths = np.array([len(stream) for stream in streams], dtype="<u4")
    return struct.pack(FRAME_FORMAT, len(sequence), len(streams), 0) + lengths.tobytes() + b"".join(streams)


def decode_frame(frame: bytes, header: ShardHeader, num_positions: int) -> ScoredSequence:
    """Return the sequence in a frame whose checksum was already checked.

    Raises:
        CorruptFrame: what the frame holds breaks a rule of SPEC 5.
        LimitExceeded: a declared size is above its limit (SPEC 8).
    """
    data = _decode_columns(frame, header, num_positions)
    if (data["input_ids"] >= header.fingerprint.vocab_size).any():
        raise CorruptFrame("an input id is outside the vocabulary (SPEC 5.4)")
    if (data["loss_mask"] > 1).any():
        raise CorruptFrame("the loss mask holds other bytes than 0 and 1 (SPEC 5.4)")
    rows = _decode_rows(data, header)
    segments = data.get("segment_ids")
    return ScoredSequence(
        input_ids_L=data["input_ids"].astype(np.int32),
        rows=rows,
        loss_mask_L=data["loss_mask"] == 0,
        segment_ids_L=None if segments is None else segments.astype(np.int32),
    )


def _columns(sequence: ScoredSequence, header: ShardHeader) -> dict[str, UInt32]:
    rows = sequence.rows
    if rows.k != header.k or rows.tail_samples != header.tail_samples:
        raise InvalidRows(
            f"rows have k {rows.k} and {rows.tail_samples} tail samples, the shard {header.k} and {header.tail_samples}"
        )
    vocab_size, present = header.fingerprint.vocab_size, ~rows.absent_P
    columns = {
        "input_ids": _ids(sequence.input_ids_L, vocab_size, "input ids"),
        "loss_mask": np.zeros(len(sequence), dtype=np.uint32)
        if sequence.loss_mask_L is None
        else (~sequence.loss_mask_L).astype(np.uint32),
        "token_ids": _support(rows, vocab_size),
        "logprobs": _values(rows),
        "log_tail_mass": _floats(rows.log_tail_mass_P, present, "log_tail_mass", upper=LOGPROB_SLACK),
    }
    if "segment_ids" in header.columns:
        segments = sequence.segment_ids_L
        if segments is None or segments.min() < 0 or segments.max() >= PAD_CODE:
            raise InvalidRows("segment ids are missing or out of range (SPEC 5.4)")
        columns["segment_ids"] = segments.astype(np.uint32)
    elif sequence.segment_ids_L is not None:
        raise InvalidRows("the shard has no column for the segment ids given")
    for name, column in (("logsumexp", rows.logsumexp_P), ("entropy", rows.entropy_P)):
        if name in header.columns:
            if column is None:
                raise InvalidRows(f"the shard has a column {name} and the rows have none")
            columns[name] = _floats(column, present, name)
    if header.tail_samples:
        columns["tail_token_ids"] = _tail(rows, vocab_size)
    return columns


def _ids(ids: Int32, vocab_size: int, what: str) -> UInt32:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise InvalidRows(f"{what} must lie in 0..{vocab_size - 1}, found {ids.min()}..{ids.max()} (SPEC 5.4)")
    return ids.astype(np.uint32)


def _support(rows: Rows, vocab_size: int) -> UInt32:
    pad = rows.token_ids_PK == PAD_ID
    if (pad[:, :-1] & ~pad[:, 1:]).any():
        raise InvalidRows("padding stands before an entry of its row (SPEC 5.4)")
    _ids(rows.token_ids_PK[~pad], vocab_size, "support ids")
    ordered = np.sort(rows.token_ids_PK, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != PAD_ID)).any():
        raise InvalidRows("a row names a token twice (SPEC 5.4)")
    return np.where(pad, PAD_CODE, rows.token_ids_PK).astype(np.uint32)


def _values(rows: Rows) -> UInt32:
    pad, values = rows.token_ids_PK == PAD_ID, rows.logprobs_PK
    if not np.isfinite(values[~pad]).all() or (values[~pad] > LOGPROB_SLACK).any():
        raise InvalidRows("a logprob is not finite or above 0 (SPEC 5.5)")
    codes = to_bf16_codes(np.where(pad, -np.inf, np.minimum(values, 0.0)))
    if (codes[:, 1:] < codes[:, :-1]).any():
        raise InvalidRows("a row is not in probability order (SPEC 5.5)")
    deltas = codes.copy()
    deltas[:, 1:] -= codes[:, :-1]
    return deltas.astype(np.uint32)


def to_bf16_codes(logprobs: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    """Return the magnitudes of logprobs on the bf16 grid, rounded to nearest even, as 16-bit patterns."""
    bits = np.abs(logprobs).astype(np.float32).view(np.uint32)
    codes: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return codes


def from_bf16_codes(codes: npt.NDArray[np.uint16]) -> Float32:
    """Return the logprobs whose magnitudes have these bf16 patterns."""
    return -(codes.astype(np.uint32) << 16).view(np.float32)


def _floats(column: Float32, present: Bool, name: str, upper: float = np.inf) -> UInt32:
    values = column[present]
    bad = np.isnan(values) | (values > upper) | (values == np.inf)
    if name != "log_tail_mass":
        bad |= np.isinf(values)
    if bad.any():
        raise InvalidRows(f"{name} holds {values[bad][0]} (SPEC 5.6)")
    # absent rows are never filled with numbers
    return np.where(present, column, 0.0).astype("<f4").view("<u4")


def _tail(rows: Rows, vocab_size: int) -> UInt32:
    tail = rows.tail_token_ids_PN
    assert tail is not None
    none = rows.absent_P | (rows.log_tail_mass_P == -np.inf)
    if (tail[none] != PAD_ID).any():
        raise InvalidRows("a row without a tail has tail samples (SPEC 5.7)")
    _ids(tail[~none], vocab_size, "tail samples")
    codes = np.sort(np.where(none[:, None], PAD_CODE, tail), axis=1).astype(np.uint32)
    codes[:, 1:] -= codes[:, :-1].copy()
    return codes


def _decode_columns(frame: bytes, header: ShardHeader, num_positions: int) -> dict[str, UInt32]:
    if len(frame) < FRAME_HEADER_SIZE + 4 * header.num_streams:
        raise CorruptFrame(f"a frame of {len(frame)} bytes is too short for its stream lengths (SPEC 5.1)")
    positions, num_streams, reserved = struct.unpack_from(FRAME_FORMAT, frame)
    if positions != num_positions or num_streams != header.num_streams or reserved:
        raise CorruptFrame("the frame's counts are not those of the index and header (SPEC 5.1)")
    lengths = np.frombuffer(frame, "<u4", num_streams, FRAME_HEADER_SIZE).astype(np.int64)
    ends = FRAME_HEADER_SIZE + 4 * num_streams + np.cumsum(lengths)
    if ends[-1] != len(frame):
        raise CorruptFrame("the streams do not fill the frame (SPEC 5.1)")
    view, stream, data = memoryview(frame), 0, {}
    for name in header.columns:
        planes = range(stream, stream + COLUMNS[name][0])
        parts = [view[ends[i] - lengths[i] : ends[i]] for i in planes]
        data[name] = decode_planes(parts, header.entries(name, num_positions))
        stream = planes.stop
    return data


def _decode_rows(data: dict[str, UInt32], header: ShardHeader) -> Rows:
    vocab_size = header.fingerprint.vocab_size
    ids_PK = data["token_ids"].reshape(-1, header.k)
    codes_PK = np.cumsum(data["logprobs"].reshape(-1, header.k), axis=1, dtype=np.uint16)
    pad_PK = ids_PK == PAD_CODE
    if ((ids_PK >= vocab_size) & ~pad_PK).any():
        raise CorruptFrame("a support id is outside the vocabulary (SPEC 5.4)")
    if (pad_PK[:, :-1] & ~pad_PK[:, 1:]).any():
        raise CorruptFrame("padding stands before an entry of its row (SPEC 5.4)")
    if ((codes_PK == PAD_VALUE) != pad_PK).any() or (codes_PK > PAD_VALUE).any():
        raise CorruptFrame("values and ids are padded in different places, or a value is no number (SPEC 5.5)")
    if (codes_PK[:, 1:] < codes_PK[:, :-1]).any():
        raise CorruptFrame("a row is not in probability order (SPEC 5.5)")
    absent_P = pad_PK[:, 0]
    floats = {name: _decode_floats(data[name], name, absent_P) for name in header.columns if name in _FLOATS}
    tail_PN = None
    if header.tail_samples:
        tail_PN = _decode_tail(data["tail_token_ids"], header, absent_P | (floats["log_tail_mass"] == -np.inf))
    return Rows(
        token_ids_PK=np.where(pad_PK, PAD_ID, ids_PK.astype(np.int32)),
        logprobs_PK=from_bf16_codes(codes_PK),
        log_tail_mass_P=floats["log_tail_mass"],
        logsumexp_P=floats.get("logsumexp"),
        entropy_P=floats.get("entropy"),
        tail_token_ids_PN=tail_PN,
    )


_FLOATS = {"log_tail_mass", "logsumexp", "entropy"}


def _decode_floats(bits: UInt32, name: str, absent_P: Bool) -> Float32:
    if bits[absent_P].any():
        raise CorruptFrame(f"{name} of an absent row is not zero (SPEC 5.6)")
    values: Float32 = bits.view("<f4").astype(np.float32)
    present = values[~absent_P]
    allowed = np.isfinite(present)
    if name == "log_tail_mass":
        allowed = (allowed & (present <= LOGPROB_SLACK)) | (present == -np.inf)
    if not allowed.all():
        raise CorruptFrame(f"{name} holds {present[~allowed][0]} (SPEC 5.6)")
    values[absent_P] = np.nan
    return values


def _decode_tail(deltas: UInt32, header: ShardHeader, none_P: Bool) -> Int32:
    codes_PN = np.cumsum(deltas.reshape(-1, header.tail_samples), axis=1, dtype=np.int64)
    if (codes_PN[none_P] != PAD_CODE).any():
        raise CorruptFrame("a row without a tail has tail samples (SPEC 5.7)")
    if (codes_PN[~none_P] >= header.fingerprint.vocab_size).any():
        raise CorruptFrame("a tail sample is outside the vocabulary (SPEC 5.7)")
    codes_PN[none_P] = PAD_ID
    return codes_PN.astype(np.int32)
