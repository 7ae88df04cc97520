"""The metadata of a shard: everything that is needed to decode its frames (SPEC 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import __version__
from .canonical import canonical_json, parse_canonical
from .constants import MAX_K, MAX_METADATA_BYTES, MAX_STREAMS, MAX_TAIL_SAMPLES, MAX_VOCAB
from .errors import CorruptMetadata, FormatError, LimitExceeded
from .fingerprint import Fingerprint
from .profiles import PROFILES, Profile

ALIGNMENT = "row i predicts token i + 1"
TIES = "logprob descending, the teacher's ties by id ascending"
VALUE = "logprob"

# name: (planes, integers of a sequence of n tokens, transform)
COLUMNS: dict[str, tuple[int, str, str]] = {
    "input_ids": (3, "n", "ids"),
    "loss_mask": (1, "n", "inverted"),
    "segment_ids": (3, "n", "none"),
    "token_ids": (3, "(n-1)*k", "ids"),
    "logprobs": (2, "(n-1)*k", "profile, row delta"),
    "log_tail_mass": (4, "n-1", "float32"),
    "logsumexp": (4, "n-1", "float32"),
    "entropy": (4, "n-1", "float32"),
    "tail_token_ids": (3, "(n-1)*tail_samples", "ids, ascending, row delta"),
}
REQUIRED = {"input_ids", "loss_mask", "token_ids", "logprobs", "log_tail_mass"}
OPTIONAL = {"segment_ids", "logsumexp", "entropy"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a shard declares it; one that this version does not know is skipped."""

    name: str
    planes: int

    @property
    def is_known(self) -> bool:
        """Whether this version can decode it."""
        return self.name in COLUMNS


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """What a shard says of itself. Without `columns`, all that rows may have but segment ids."""

    fingerprint: Fingerprint
    k: int
    tail_samples: int = 0
    profile: str = "bf16"
    columns: tuple[Column, ...] = ()
    writer: str = f"teachercache {__version__}"

    def __post_init__(self) -> None:
        _check_integer("vocab_size", self.fingerprint.vocab_size, 1, MAX_VOCAB)
        _check_integer("k", self.k, 1, MAX_K)
        _check_integer("tail_samples", self.tail_samples, 0, MAX_TAIL_SAMPLES)
        if self.profile not in PROFILES:
            raise CorruptMetadata(f"profile {self.profile!r} is not one of {sorted(PROFILES)} (SPEC 6.4)")
        if not self.columns:
            left_out = {"segment_ids"} | (set() if self.tail_samples else {"tail_token_ids"})
            columns = tuple(Column(name, COLUMNS[name][0]) for name in COLUMNS if name not in left_out)
            object.__setattr__(self, "columns", columns)
        self._check_columns()

    def _check_columns(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names) or self.num_streams > MAX_STREAMS:
            raise CorruptMetadata(f"columns are repeated, or have more than {MAX_STREAMS} planes (SPEC 6.5)")
        drawn = {"entropy", "tail_token_ids"} if self.tail_samples else set()
        if missing := (REQUIRED | drawn) - set(names):
            raise CorruptMetadata(f"columns {sorted(missing)} are missing (SPEC 6.5)")
        if not self.tail_samples and "tail_token_ids" in names:
            raise CorruptMetadata("tail_token_ids stands in a shard with tail_samples 0 (SPEC 6.5)")
        for column in self.columns:
            if column.is_known and column.planes != COLUMNS[column.name][0]:
                raise CorruptMetadata(f"column {column.name} has {column.planes} planes (SPEC 6.5)")

    @property
    def num_streams(self) -> int:
        """Streams in each frame."""
        return sum(column.planes for column in self.columns)

    @property
    def values(self) -> Profile:
        """The grid that logprobs lie on."""
        return PROFILES[self.profile]

    def has(self, column: str) -> bool:
        """Tell whether frames have this column."""
        return any(column == own.name for own in self.columns)

    def shape(self, column: str, num_positions: int) -> tuple[int, ...]:
        """Return the shape of a column of a sequence of `num_positions` tokens."""
        rows = num_positions - 1
        shapes = {"n": (num_positions,), "n-1": (rows,), "(n-1)*k": (rows, self.k)}
        return shapes.get(COLUMNS[column][1], (rows, self.tail_samples))

    def to_bytes(self) -> bytes:
        """Return the metadata's canonical JSON (SPEC 6)."""
        columns = [
            {"name": column.name, "planes": column.planes, "transform": COLUMNS[column.name][2]}
            for column in self.columns
        ]
        text = canonical_json(
            {
                "alignment": ALIGNMENT,
                "columns": columns,
                "fingerprint": self.fingerprint.to_json(),
                "k": self.k,
                "profile": self.profile,
                "tail_samples": self.tail_samples,
                "ties": TIES,
                "value": VALUE,
                "writer": self.writer,
            }
        )
        if len(text) > MAX_METADATA_BYTES:
            raise LimitExceeded(f"metadata of {len(text)} bytes is above the limit of {MAX_METADATA_BYTES} (SPEC 9)")
        return text

    @classmethod
    def from_bytes(cls, text: bytes) -> ShardMetadata:
        """Read metadata; keys that a newer minor version adds are ignored.

        Raises:
            CorruptMetadata: a rule of SPEC 6 is broken.
            LimitExceeded: a count is above its limit (SPEC 9).
        """
        try:
            value = parse_canonical(text)
            for name, rule in (("alignment", ALIGNMENT), ("ties", TIES), ("value", VALUE)):
                if value[name] != rule:
                    raise CorruptMetadata(f"{name} is {value[name]!r}, not {rule!r} (SPEC 6.2)")
            # without columns of its own, `cls` would give it the usual ones
            if not value["columns"]:
                raise CorruptMetadata("there are no columns (SPEC 6.5)")
            if not isinstance(value["writer"], str):
                raise CorruptMetadata("writer is not text (SPEC 6.2)")
            # before the fingerprint itself calls it malformed
            _check_integer("vocab_size", value["fingerprint"]["vocab_size"], 1, MAX_VOCAB)
            return cls(
                fingerprint=Fingerprint.from_json(value["fingerprint"]),
                k=value["k"],
                tail_samples=value["tail_samples"],
                profile=value["profile"],
                columns=tuple(_column(column) for column in value["columns"]),
                writer=value["writer"],
            )
        except (CorruptMetadata, LimitExceeded):
            raise
        except (FormatError, KeyError, TypeError) as error:
            raise CorruptMetadata(f"the metadata is malformed: {error} (SPEC 6)") from error


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CorruptMetadata(f"{name} is {value!r}, not an integer (SPEC 6.2)")
    if not low <= value <= high:
        raise LimitExceeded(f"{name} is {value!r}, allowed are {low} to {high} (SPEC 9)")


def _column(value: Any) -> Column:
    name, planes, transform = value["name"], value["planes"], value["transform"]
    texts = isinstance(name, str) and isinstance(transform, str)
    if not texts or not isinstance(planes, int) or isinstance(planes, bool) or planes < 1:
        raise CorruptMetadata(f"column {value!r} is malformed (SPEC 6.5)")
    if name in COLUMNS and transform != COLUMNS[name][2]:
        raise CorruptMetadata(f"column {name} has transform {transform!r} (SPEC 6.5)")
    return Column(name, planes)
