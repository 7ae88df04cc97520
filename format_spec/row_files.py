"""Rows in Parquet files, as `export` writes them or plain: the columns of arrow_rows.py.

A plain file needs input_ids, token_ids and logprobs. Its entries may stand in any order; k is the longest support.
Without log_tail_mass that is computed from the logprobs, with the loss that `support.log_tail_mass` states; then a
support that lost entries to a filter (top-p, penalties, a temperature) gives a wrong tail, which nobody can see.
A row with a value that is NaN or +inf is absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .arrow_rows import FLOATS, MATRICES
from .errors import FormatError, InvalidRows, SourceError
from .export import NOTE
from .fingerprint import Fingerprint
from .metadata import COLUMNS
from .parquet_source import ParquetSource, Record
from .rows import PAD_ID, Rows, ScoredSequence
from .support import log_tail_mass, ranked

KINDS = {"loss_mask": ["boolean", "integer"]} | {name: ["float"] for name in (*FLOATS, "logprobs")}
NEEDED = ("input_ids", "token_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class Maker:
    """What exported rows say of themselves."""

    fingerprint: Fingerprint
    profile: str
    k: int
    tail_samples: int
    teacher_name: str


class RowFiles:
    """The sequences of Parquet files with the columns of arrow_rows.py.

    Raises:
        SourceError: a needed column is missing, or one has the wrong type.
    """

    layout = "rows"
    vocab_size = None

    def __init__(self, source: ParquetSource) -> None:
        if not source.has(*NEEDED):
            raise SourceError(f"need the columns {list(NEEDED)}, found {source.schema.names}")
        self._source = source
        self.columns = [name for name in COLUMNS if source.has(name)]
        self.ignored = sorted(set(source.schema.names) - set(self.columns))
        for name in self.columns:
            source.check_lists(name, 2 if name in MATRICES else 1, KINDS.get(name, ["integer"]))
        self.maker = _maker(source)
        if self.maker is not None:
            self.k, self.tail_samples = self.maker.k, self.maker.tail_samples
        else:
            self.k = self._longest("token_ids")
            self.tail_samples = self._longest("tail_token_ids") if source.has("tail_token_ids") else 0
        if not self.tail_samples:
            self.columns = [name for name in self.columns if name != "tail_token_ids"]
        elif not source.has("tail_token_ids", "log_tail_mass", "entropy"):
            raise SourceError("rows with tail samples need tail_token_ids, log_tail_mass and entropy")

    def __len__(self) -> int:
        return self._source.num_records

    def __iter__(self) -> Iterator[ScoredSequence]:
        for record in self._source.records(self.columns):
            try:
                yield self._sequence(record)
            except InvalidRows as error:
                raise InvalidRows(f"{record.where}: {error}") from error

    def _longest(self, column: str) -> int:
        return max(int(record.lists(column)[1].max(initial=0)) for record in self._source.records([column]))

    def _sequence(self, record: Record) -> ScoredSequence:
        if not np.array_equal(record.lists("token_ids")[1], record.lists("logprobs")[1]):
            raise InvalidRows("token_ids and logprobs have lists of other lengths")
        logprobs_PK = record.matrix("logprobs", self.k, -np.inf)
        ids_PK, logprobs_PK = ranked(record.matrix("token_ids", self.k, PAD_ID, np.int32), logprobs_PK)
        floats = {name: record.values(name).astype(np.float32) for name in FLOATS if name in self.columns}
        tail_PN = None
        if self.tail_samples:
            tail_PN = record.matrix("tail_token_ids", self.tail_samples, PAD_ID, np.int32)
        segments_L = record.values("segment_ids").astype(np.int32) if "segment_ids" in self.columns else None
        return ScoredSequence(
            input_ids_L=record.values("input_ids").astype(np.int32),
            rows=Rows(
                token_ids_PK=ids_PK,
                logprobs_PK=logprobs_PK.astype(np.float32),
                log_tail_mass_P=floats["log_tail_mass"] if "log_tail_mass" in floats else log_tail_mass(logprobs_PK),
                logsumexp_P=floats.get("logsumexp"),
                entropy_P=floats.get("entropy"),
                tail_token_ids_PN=tail_PN,
            ),
            loss_mask_L=record.values("loss_mask").astype(np.bool_) if "loss_mask" in self.columns else None,
            segment_ids_L=segments_L,
        )


def _maker(source: ParquetSource) -> Maker | None:
    notes = {key.decode(): value for key, value in (source.schema.metadata or {}).items()}
    if NOTE + "metadata" not in notes:
        return None
    try:
        value = json.loads(notes[NOTE + "metadata"])
        teacher_name = notes.get(NOTE + "teacher_name", b"").decode()
        fingerprint = Fingerprint.from_json(value["fingerprint"])
        return Maker(fingerprint, value["profile"], value["k"], value["tail_samples"], teacher_name)
    except (FormatError, KeyError, TypeError, ValueError) as error:
        raise SourceError(f"the schema's {NOTE}metadata is malformed: {error}") from error
