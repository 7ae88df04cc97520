"""The header of a shard: everything that is needed to decode its frames (SPEC 3, 4)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import xxhash

from .. import __version__
from .canonical import canonical_json, parse_canonical
from .constants import (
    HEADER_FORMAT,
    HEADER_MAGIC,
    KNOWN_FEATURES,
    MAX_HEADER_BYTES,
    MAX_K,
    MAX_TAIL_SAMPLES,
    MAX_VOCAB,
)
from .errors import CorruptHeader, FormatError, LimitExceeded, NotAShard, UnsupportedFeature, UnsupportedVersion
from .fingerprint import Fingerprint
from .version import FORMAT_MAJOR, FORMAT_MINOR, FORMAT_VERSION

HEADER_SIZE = struct.calcsize(HEADER_FORMAT)
ALIGNMENT = "row i predicts token i + 1"
TIES = "logprob descending, the teacher's ties by id ascending"
VALUE = "logprob"

# name: (planes, entries per sequence of n tokens, transform)
COLUMNS: dict[str, tuple[int, str, str]] = {
    "input_ids": (3, "n", "none"),
    "loss_mask": (1, "n", "inverted"),
    "segment_ids": (3, "n", "none"),
    "token_ids": (3, "(n-1)*k", "none"),
    "logprobs": (2, "(n-1)*k", "magnitude bits, row delta"),
    "log_tail_mass": (4, "n-1", "none"),
    "logsumexp": (4, "n-1", "none"),
    "entropy": (4, "n-1", "none"),
    "tail_token_ids": (3, "(n-1)*tail_samples", "ascending, row delta"),
}
REQUIRED = {"input_ids", "loss_mask", "token_ids", "logprobs", "log_tail_mass"}


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a shard says of itself before its first frame."""

    fingerprint: Fingerprint
    k: int
    tail_samples: int = 0
    profile: str = "bf16"
    columns: tuple[str, ...] = ()
    writer: str = f"teachercache {__version__}"

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("vocab_size", self.fingerprint.vocab_size, 1, MAX_VOCAB),
            ("k", self.k, 1, MAX_K),
            ("tail_samples", self.tail_samples, 0, MAX_TAIL_SAMPLES),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise LimitExceeded(f"{name} is {value!r}, allowed are {low} to {high} (SPEC 8)")
        if self.profile != "bf16":
            raise CorruptHeader(f"profile {self.profile!r} is not known to format {FORMAT_VERSION} (SPEC 4.4)")
        if not self.columns:
            object.__setattr__(self, "columns", self._default_columns())
        drawn = {"entropy", "tail_token_ids"} if self.tail_samples else set()
        if list(self.columns) != [name for name in COLUMNS if name in self.columns]:
            raise CorruptHeader(f"columns {self.columns} are unknown, repeated or out of order (SPEC 4.5)")
        if missing := (REQUIRED | drawn) - set(self.columns):
            raise CorruptHeader(f"columns {sorted(missing)} are missing (SPEC 4.5)")
        if not self.tail_samples and "tail_token_ids" in self.columns:
            raise CorruptHeader("tail_token_ids stands in a shard with tail_samples 0 (SPEC 4.5)")

    def _default_columns(self) -> tuple[str, ...]:
        left_out = {"segment_ids"} | (set() if self.tail_samples else {"tail_token_ids"})
        return tuple(name for name in COLUMNS if name not in left_out)

    @property
    def num_streams(self) -> int:
        """Streams in each frame."""
        return sum(COLUMNS[name][0] for name in self.columns)

    def entries(self, column: str, num_positions: int) -> int:
        """Return how many integers a column of a sequence of `num_positions` tokens has."""
        rows = num_positions - 1
        counts = {"n": num_positions, "n-1": rows, "(n-1)*k": rows * self.k}
        return counts.get(COLUMNS[column][1], rows * self.tail_samples)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON header (SPEC 4)."""
        columns = [{"name": n, "planes": COLUMNS[n][0], "transform": COLUMNS[n][2]} for n in self.columns]
        return {
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

    def to_bytes(self) -> bytes:
        """Return the fixed header and the JSON header."""
        text = canonical_json(self.to_json())
        if len(text) > MAX_HEADER_BYTES:
            raise LimitExceeded(f"a header of {len(text)} bytes is above the limit of {MAX_HEADER_BYTES} (SPEC 8)")
        checksum = xxhash.xxh3_64_intdigest(text)
        fixed = struct.pack(HEADER_FORMAT, HEADER_MAGIC, FORMAT_MAJOR, FORMAT_MINOR, 0, len(text), checksum, 0)
        return fixed + text

    @classmethod
    def from_json(cls, value: Any) -> ShardHeader:
        """Read the JSON header.

        Raises:
            CorruptHeader: a rule of SPEC 4 is broken.
        """
        try:
            columns = tuple(column["name"] for column in value["columns"])
            header = cls(
                fingerprint=Fingerprint.from_json(value["fingerprint"]),
                k=value["k"],
                tail_samples=value["tail_samples"],
                profile=value["profile"],
                columns=columns,
                writer=value["writer"],
            )
            same = header.to_json() == value
        except (CorruptHeader, LimitExceeded):
            raise
        except (FormatError, KeyError, TypeError) as error:
            raise CorruptHeader(f"the JSON header is malformed: {error} (SPEC 4)") from error
        if not same:
            raise CorruptHeader("the JSON header states other rules than this version has (SPEC 4)")
        return header


def read_fixed_header(data: bytes) -> tuple[int, int]:
    """Return (length, xxh3) of the JSON header that follows the fixed one.

    Raises:
        NotAShard, UnsupportedVersion, UnsupportedFeature, LimitExceeded, CorruptHeader: by clause of SPEC 3.
    """
    if len(data) < HEADER_SIZE or data[:4] != HEADER_MAGIC:
        raise NotAShard(f"does not begin with {HEADER_MAGIC!r} and a header of {HEADER_SIZE} bytes (SPEC 3.1)")
    _, major, minor, features, length, checksum, reserved = struct.unpack(HEADER_FORMAT, data[:HEADER_SIZE])
    check_version(major, minor)
    if unknown := features & ~KNOWN_FEATURES:
        raise UnsupportedFeature(f"required features {unknown:#x} are not known to this reader (SPEC 3.3)")
    if length > MAX_HEADER_BYTES:
        raise LimitExceeded(f"a header of {length} bytes is above the limit of {MAX_HEADER_BYTES} (SPEC 8)")
    if reserved:
        raise CorruptHeader("reserved bytes of the header are not zero (SPEC 3.5)")
    return length, checksum


def read_json_header(text: bytes, checksum: int) -> ShardHeader:
    """Return the header in `text`, whose xxh3 must be `checksum` (SPEC 3.4)."""
    if xxhash.xxh3_64_intdigest(text) != checksum:
        raise CorruptHeader("the JSON header does not match its checksum (SPEC 3.4)")
    try:
        value = parse_canonical(text)
    except FormatError as error:
        raise CorruptHeader(f"the JSON header is malformed: {error} (SPEC 4)") from error
    return ShardHeader.from_json(value)


def check_version(major: int, minor: int) -> None:
    """Refuse versions that this reader does not know; while major is 0, every minor is a version of its own."""
    if (major, minor) != (FORMAT_MAJOR, FORMAT_MINOR):
        raise UnsupportedVersion(f"format {major}.{minor} is not {FORMAT_VERSION}, the one read here (SPEC 3.2)")
