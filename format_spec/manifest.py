"""The manifest: the immutable JSON that lists a cache's shards and says who made them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .audit import AuditTally
from .canonical import canonical_json, parse_canonical
from .digest import digest_bytes, is_digest
from .errors import FormatError, ManifestError
from .fingerprint import Fingerprint
from .request import CacheRequest
from .rows import Rows
from .version import FORMAT_VERSION

KIND = "teachercache.manifest"
MASS_BINS = 10


@dataclass(frozen=True, slots=True)
class ShardDescriptor:
    """A shard named by a manifest; `first` is the number of its first sequence in the data set."""

    digest: str
    bytes: int
    first: int
    sequences: int
    positions: int

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise ManifestError(f"shard digest {self.digest!r} is not a digest")
        for name in ("bytes", "first", "sequences", "positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ManifestError(f"shard {self.digest}: {name} {value!r} is not a count")


@dataclass(frozen=True, slots=True)
class Quality:
    """What the rows look like, over all shards; means are decimal strings, for manifests hold no floats.

    `support_mass_histogram` counts rows by support mass in ten equal bins from 0 to 1. Of the audited rows, which the
    teacher scored again after they were stored, the KL from stored to scored again is in nats, and `audit_draws_z` says
    how many standard deviations the tail samples are from that tail.
    """

    rows: int
    absent_rows: int
    mean_support_mass: str
    mean_entropy: str
    support_mass_histogram: tuple[int, ...]
    audited_rows: int
    audit_mean_kl: str
    audit_max_kl: str
    audit_draws_z: str

    def __post_init__(self) -> None:
        if len(self.support_mass_histogram) != MASS_BINS:
            raise ManifestError(f"support_mass_histogram needs {MASS_BINS} bins")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A cache: its request, who made it, and its shards in the order of the data set."""

    request: CacheRequest
    fingerprint: Fingerprint
    teacher_name: str
    sequences: int
    complete: bool
    shards: tuple[ShardDescriptor, ...]
    quality: Quality

    def __post_init__(self) -> None:
        first = 0
        for shard in self.shards:
            if shard.first < first or (self.complete and shard.first != first):
                raise ManifestError(f"shard {shard.digest} begins at sequence {shard.first}, expected {first}")
            first = shard.first + shard.sequences
        if first > self.sequences or (self.complete and first != self.sequences):
            raise ManifestError(f"shards hold sequences up to {first}, the data set has {self.sequences}")
        if self.fingerprint.teacher != self.request.teacher:
            raise ManifestError("the fingerprint names another teacher than the request")

    @property
    def digest(self) -> str:
        """Identity of the manifest: the digest of its canonical JSON."""
        return digest_bytes(self.to_bytes())

    @property
    def num_positions(self) -> int:
        """Tokens in all shards."""
        return sum(shard.positions for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_bytes(self) -> bytes:
        """Return the manifest's canonical JSON."""
        return canonical_json(
            {
                "kind": KIND,
                "format_version": FORMAT_VERSION,
                "request_id": self.request.id,
                "request": self.request.to_json(),
                "fingerprint": self.fingerprint.to_json(),
                "teacher_name": self.teacher_name,
                "sequences": self.sequences,
                "complete": self.complete,
                "shards": [asdict(shard) for shard in self.shards],
                "totals": {"bytes": self.num_bytes, "positions": self.num_positions, "shards": len(self.shards)},
                "quality": asdict(self.quality),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest, checking every field.

        Raises:
            ManifestError: not a manifest of this format version, or inconsistent.
        """
        try:
            value = parse_canonical(data)
            if not isinstance(value, dict) or value.get("kind") != KIND:
                raise ManifestError("not a teachercache manifest")
            if value["format_version"] != FORMAT_VERSION:
                raise ManifestError(f"format_version {value['format_version']!r} is not {FORMAT_VERSION!r}")
            quality = dict(value["quality"])
            quality["support_mass_histogram"] = tuple(quality["support_mass_histogram"])
            manifest = cls(
                request=CacheRequest.from_json(value["request"]),
                fingerprint=Fingerprint.from_json(value["fingerprint"]),
                teacher_name=value["teacher_name"],
                sequences=value["sequences"],
                complete=value["complete"],
                shards=tuple(ShardDescriptor(**shard) for shard in value["shards"]),
                quality=Quality(**quality),
            )
        except ManifestError:
            raise
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"malformed manifest: {error}") from error
        if manifest.to_bytes() != data:
            raise ManifestError("the manifest's totals or request_id do not match what it lists")
        return manifest


class QualityTally:
    """Adds up the quality of shards; plain sums, so that tallies of shards add to that of the cache."""

    def __init__(self) -> None:
        self.rows = 0
        self.absent_rows = 0
        self.mass = 0.0
        self.entropy = 0.0
        self.histogram = [0] * MASS_BINS
        self.audit = AuditTally()

    def add(self, rows: Rows) -> None:
        """Count the rows of one sequence."""
        present = ~rows.absent_P
        mass = -np.expm1(rows.log_tail_mass_P[present]).clip(max=0.0)
        self.rows += len(rows)
        self.absent_rows += int(len(rows) - present.sum())
        self.mass += float(mass.sum(dtype=np.float64))
        if rows.entropy_P is not None:
            self.entropy += float(rows.entropy_P[present].sum(dtype=np.float64))
        bins = np.minimum((mass * MASS_BINS).astype(np.int64), MASS_BINS - 1)
        counts = np.bincount(bins, minlength=MASS_BINS).tolist()
        self.histogram = [a + b for a, b in zip(self.histogram, counts, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return the sums, to be stored beside a shard."""
        return self.__dict__ | {"audit": self.audit.to_json()}

    def merge(self, sums: dict[str, Any]) -> None:
        """Add the sums that another tally returned."""
        self.rows += sums["rows"]
        self.absent_rows += sums["absent_rows"]
        self.mass += sums["mass"]
        self.entropy += sums["entropy"]
        self.histogram = [a + b for a, b in zip(self.histogram, sums["histogram"], strict=True)]
        self.audit.merge(sums["audit"])

    def quality(self) -> Quality:
        """Return the summary for a manifest."""
        present = max(self.rows - self.absent_rows, 1)
        return Quality(
            rows=self.rows,
            absent_rows=self.absent_rows,
            mean_support_mass=f"{self.mass / present:.6f}",
            mean_entropy=f"{self.entropy / present:.6f}",
            support_mass_histogram=tuple(self.histogram),
            audited_rows=self.audit.rows,
            audit_mean_kl=f"{self.audit.mean_kl:.9f}",
            audit_max_kl=f"{self.audit.max_kl:.9f}",
            audit_draws_z=f"{self.audit.draws_z:.3f}",
        )
