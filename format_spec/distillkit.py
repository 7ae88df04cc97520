"""DistillKit's data sets (arcee-ai/DistillKit, snapshot a61c2e7): Parquet of packed bytes, and a config beside it.

A record has input_ids and for each row `compressed_logprobs` (the first `exact_k` logprobs, the coefficients of a
curve for the others, and residuals of its first ones) and `bytepacked_indices` (the k ids at ceil(log2 d) bits, the
highest first). Row i is the distribution after token i. A captured sequence of n tokens has n - 1 rows; a packed one
has n, and the last, which predicts no token of it, is left out.

What such a data set has lost, and an import cannot bring back:

* Values but the exact ones are a fit. With the config that DistillKit recommends, at k = 100, the divergence from the
  teacher is 4.9e-3 nats in the mean and 2.5e-2 at most, and single logprobs are off by up to 7.7 nats (on another
  machine 2.2e-4, 5.2e-3 and 0.9: its fit seems ill-conditioned in float32); with normalize_t 1.1e-4 and 4.8e-3. (The
  bf16 profile: 8.8e-6.) A fit may rise along a row, in a third of the rows it
  does: rows are put in order by the decoded values. What it takes above 0 is set to 0.
* There is no tail mass: it is computed from the decoded values and is as wrong as they are; a row of which they add up
  to 1 or more has no tail.
* There are no tail samples, no entropy, no logsumexp, and no identity of teacher and tokenizer.
* A row whose values decode to NaN or +inf is absent. A loss mask is there only where `labels` are.

Arithmetic follows DistillKit's decoder, rounding to `term_dtype` at each step, but for one thing: it rounds sums of
deltas and residuals to `exact_dtype`, which stored nothing and is left out here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .distillkit_config import WIDTHS, DistillKitConfig
from .errors import InvalidRows, SourceError
from .parquet_source import ParquetSource, Record
from .rows import Rows, ScoredSequence
from .support import log_tail_mass, ranked

VALUES, IDS = "compressed_logprobs", "bytepacked_indices"
LEGACY = ("packed_indices", "exact_values", "coeffs")

Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


class DistillKitFiles:
    """The sequences of a DistillKit data set.

    Raises:
        SourceError: a column is missing, or has another type than DistillKit gives it.
    """

    layout = "distillkit"
    tail_samples = 0
    maker = None

    def __init__(self, source: ParquetSource, config: DistillKitConfig) -> None:
        self._source, self._config = source, config
        self.k, self.vocab_size = config.k, config.d
        used = [name for name in ("input_ids", "labels", VALUES, IDS) if source.has(name)]
        for name in used:
            packed = name in (VALUES, IDS)
            source.check_lists(name, 2 if packed else 1, ["byte" if packed else "integer"])
        self._columns = used
        self.columns = ["input_ids", "loss_mask", "token_ids", "logprobs", "log_tail_mass"]
        self.ignored = sorted(set(source.schema.names) - set(used))

    def __len__(self) -> int:
        return self._source.num_records

    def __iter__(self) -> Iterator[ScoredSequence]:
        for record in self._source.records(self._columns):
            try:
                yield self._sequence(record)
            except InvalidRows as error:
                raise InvalidRows(f"{record.where}: {error}") from error

    def _sequence(self, record: Record) -> ScoredSequence:
        tokens_L = record.values("input_ids").astype(np.int32)
        values = _fixed(record, VALUES, sum(self._config.part_bytes))
        ids = _fixed(record, IDS, self._config.id_bytes)
        num_rows = len(tokens_L) - 1
        if len(ids) not in (num_rows, num_rows + 1) or len(values) != len(ids):
            raise InvalidRows(f"{len(tokens_L)} tokens have {len(values)} rows of values and {len(ids)} of ids")
        decoded_PK = decode_logprobs(values[:num_rows], self._config)
        fitted_PK = np.where((decoded_PK > 0) & (decoded_PK < np.inf), 0.0, decoded_PK)
        ids_PK, logprobs_PK = ranked(decode_ids(ids[:num_rows], self._config), fitted_PK)
        tail_P = log_tail_mass(logprobs_PK, slack=np.inf)
        return ScoredSequence(
            input_ids_L=tokens_L,
            rows=Rows(ids_PK, logprobs_PK.astype(np.float32), tail_P),
            loss_mask_L=record.values("labels") >= 0 if "labels" in self._columns else None,
        )


def decode_ids(packed: Bytes, config: DistillKitConfig) -> npt.NDArray[np.int64]:
    """Return the token ids [rows, k] in `packed` [rows, id_bytes]."""
    return _unpack(packed, config.id_bits, config.k).astype(np.int64)


def decode_logprobs(packed: Bytes, config: DistillKitConfig) -> Float64:
    """Return the logprobs [rows, k] in `packed` [rows, bytes of all parts]."""
    exact, coefficients, *bins = np.split(packed, np.cumsum(config.part_bytes)[:-1], axis=1)
    approximated = _curve(_floats(coefficients, config.term_dtype), config)
    begin = 0
    for part, scale, codes in zip(config.residual_bins, bins[::2], bins[1::2], strict=True):
        end = begin + part.num_elements
        numbers = _unpack(codes, part.element_bits, part.num_elements).astype(np.float64)
        # one bit is a sign; more are an integer from -2^(bits - 1) on
        steps = 2 * numbers - 1 if part.element_bits == 1 else numbers - 2.0 ** (part.element_bits - 1)
        approximated[:, begin:end] += steps * _floats(scale, part.scale_dtype)
        begin = end
    logprobs = np.concatenate([_floats(exact, config.exact_dtype), approximated], axis=1)
    return np.cumsum(logprobs, axis=1) if config.delta_encoding else logprobs


def _curve(coefficients: Float64, config: DistillKitConfig) -> Float64:
    num = config.num_approximated
    points = np.linspace(0, 1, num) if config.normalize_t else np.arange(num, dtype=np.float64)
    points = _rounded(points, config.term_dtype)
    total = np.zeros((len(coefficients), num))
    # a diverging term makes its rows absent
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for term, coefficient in zip(config.polynomial_terms, coefficients.T, strict=True):
            shape = points ** float(term) if isinstance(term, int) else {"sqrt": np.sqrt, "exp": np.exp}[term](points)
            total += _rounded(_rounded(shape, config.term_dtype) * coefficient[:, None], config.term_dtype)
        return _rounded(total, config.term_dtype)


def _fixed(record: Record, column: str, width: int) -> Bytes:
    values, lengths = record.lists(column)
    if (lengths != width).any():
        other = lengths[lengths != width][0]
        raise SourceError(f"{record.where}: {column!r} has rows of {other} bytes; the config makes them {width}")
    return values.reshape(len(lengths), width)


def _unpack(packed: Bytes, bits: int, count: int) -> npt.NDArray[np.uint64]:
    planes = np.unpackbits(packed, axis=1, count=count * bits).reshape(len(packed), count, bits)
    numbers = np.zeros((len(packed), count), np.uint64)
    for i in range(bits):
        numbers = (numbers << np.uint64(1)) | planes[:, :, i]
    return numbers


def _floats(packed: Bytes, dtype: str) -> Float64:
    octets = np.ascontiguousarray(packed)
    shape = (len(packed), packed.shape[1] // WIDTHS[dtype])
    if dtype == "bfloat16":
        halves = octets.view("<u2").reshape(shape).astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32).astype(np.float64)
    return octets.view(f"<f{WIDTHS[dtype]}").reshape(shape).astype(np.float64)


def _rounded(values: npt.NDArray[Any], dtype: str) -> Float64:
    """Return values rounded to a dtype's numbers, to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    # a NaN's low bits must not carry into its sign
    return np.where(np.isnan(values), values, rounded.view(np.float32).astype(np.float64))
