"""What a shard or a cache holds, in numbers: for `teachercache inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .example_row import ExampleRow
from .manifest import MASS_BINS, QualityTally
from .metadata import ShardMetadata
from .output import size_text
from .rows import PAD_ID, Rows, ScoredSequence
from .shard_set import Report, ShardSet

BAR = 40


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts, sizes in bytes, and means over the rows that are not absent.

    `column_bytes` are compressed; what is not in them is around the columns: heads, tables, indexes, metadata.
    `mean_entropy` is None where the rows have none.
    """

    path: str
    metadata: ShardMetadata
    teacher_name: str | None
    manifest: str | None
    shards: int
    sequences: int
    positions: int
    num_bytes: int
    column_bytes: dict[str, int]
    rows: int
    absent_rows: int
    full_rows: int
    mean_support_mass: float
    mean_entropy: float | None
    support_mass_histogram: tuple[int, ...]
    example: ExampleRow | None

    @property
    def full_share(self) -> float:
        """Share of the present rows that have k entries."""
        return self.full_rows / max(self.rows - self.absent_rows, 1)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the summary."""
        left_out = {"metadata", "num_bytes", "example"}
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        return own | {
            "bytes": self.num_bytes,
            "fingerprint": self.metadata.fingerprint.to_json(),
            "k": self.metadata.k,
            "tail_samples": self.metadata.tail_samples,
            "profile": self.metadata.profile,
            "columns": [asdict(column) for column in self.metadata.columns],
            "writer": self.metadata.writer,
            "full_share": self.full_share,
            "example": None if self.example is None else self.example.to_json(),
        }

    def lines(self, text: Callable[[int], str]) -> Iterator[str]:
        """Yield the summary for people; `text` shows a token."""
        yield from self._identity()
        yield f"rows       {self.rows}, {self.absent_rows} absent; {self.full_share:.1%} of the others full"
        yield f"entropy    {_entropy_text(self.mean_entropy)}"
        yield f"support    holds {self.mean_support_mass:.4f} of the mass in the mean; rows by that share:"
        yield from self._histogram()
        yield "columns    compressed"
        yield from self._columns()
        if self.example is not None:
            yield from self.example.lines(text)

    def _identity(self) -> Iterator[str]:
        own, maker = self.metadata, self.metadata.fingerprint
        yield f"path       {self.path}"
        if self.manifest is not None:
            yield f"manifest   {self.manifest}"
        yield f"teacher    {maker.teacher}{f' ({self.teacher_name})' if self.teacher_name else ''}"
        yield f"tokenizer  {maker.tokenizer}"
        yield f"engine     {maker.engine}, {maker.dtype} with head {maker.head_dtype}, {maker.device}, {maker.kernel}"
        yield f"software   {', '.join(f'{name} {version}' for name, version in maker.software.items()) or 'unknown'}"
        yield f"stored     k {own.k}, {own.tail_samples} tail samples, profile {own.profile}, by {own.writer}"
        yield f"           vocabulary of {maker.vocab_size}"
        per_token = self.num_bytes / self.positions
        shards = "one shard" if self.shards == 1 else f"{self.shards} shards"
        yield f"size       {size_text(self.num_bytes)}, {per_token:.1f} bytes a token, in {shards}"
        yield f"sequences  {self.sequences} with {self.positions} tokens"

    def _histogram(self) -> Iterator[str]:
        most = max(self.support_mass_histogram)
        for number, count in enumerate(self.support_mass_histogram):
            bar = "#" * -(-count * BAR // max(most, 1))
            yield f"  {number / MASS_BINS:.1f} to {(number + 1) / MASS_BINS:.1f}  {count:10d}  {bar}".rstrip()

    def _columns(self) -> Iterator[str]:
        sizes = self.column_bytes | {"around them": self.num_bytes - sum(self.column_bytes.values())}
        for name, size in sizes.items():
            share = f"{size / self.num_bytes:6.1%}"
            yield f"  {name:15} {size_text(size):>10} {size / self.positions:8.2f} bytes a token {share}"


@dataclass(frozen=True, slots=True)
class SequenceSummary:
    """One sequence of a shard or a cache; means are over the rows that are not absent, `mean_entropy` in nats."""

    path: str
    sequence: int
    key: str
    input_ids: tuple[int, ...]
    rows: int
    absent_rows: int
    counted_rows: int
    mean_support_mass: float
    mean_entropy: float | None
    example: ExampleRow | None

    @classmethod
    def of(cls, path: str, number: int, sequence: ScoredSequence) -> SequenceSummary:
        """Return the summary of sequence `number` of what `path` names."""
        tally = QualityTally()
        tally.add(sequence.rows)
        present = max(tally.rows - tally.absent_rows, 1)
        return cls(
            path=path,
            sequence=number,
            key=sequence.key.hex(),
            input_ids=tuple(sequence.input_ids_L.tolist()),
            rows=tally.rows,
            absent_rows=tally.absent_rows,
            counted_rows=int(sequence.counted_P.sum()),
            mean_support_mass=tally.mass / present,
            mean_entropy=None if sequence.rows.entropy_P is None else tally.entropy / present,
            example=ExampleRow.of(number, sequence),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the summary."""
        return asdict(self)

    def lines(self, text: Callable[[int], str]) -> Iterator[str]:
        """Yield the summary for people; `text` shows a token."""
        yield f"path       {self.path}"
        yield f"sequence   {self.sequence} with {len(self.input_ids)} tokens, key {self.key}"
        yield f"rows       {self.rows}, {self.absent_rows} absent, {self.counted_rows} count in a loss"
        yield f"entropy    {_entropy_text(self.mean_entropy)}"
        yield f"support    holds {self.mean_support_mass:.4f} of the mass in the mean"
        if self.example is not None:
            yield from self.example.lines(text)


def summarise(shards: ShardSet, report: Report | None = None) -> Summary:
    """Read everything and return what is there."""
    sizes: dict[str, int] = {}
    tally, full, positions, num_bytes, done = QualityTally(), 0, 0, 0, 0
    example: ExampleRow | None = None
    for member in shards.members:
        with shards.open(member) as shard:
            positions, num_bytes = positions + shard.num_positions, num_bytes + shard.size
            for name, size in shard.column_bytes().items():
                sizes[name] = sizes.get(name, 0) + size
            for sequence in shard:
                tally.add(sequence.rows)
                full += _full_rows(sequence.rows)
                example = example or ExampleRow.of(done, sequence)
                done += 1
                if report is not None:
                    report(done, shards.num_sequences)
    present = max(tally.rows - tally.absent_rows, 1)
    manifest = shards.manifest
    return Summary(
        path=str(shards.path),
        metadata=shards.metadata,
        teacher_name=None if manifest is None else manifest.teacher_name,
        manifest=None if manifest is None else manifest.digest,
        shards=len(shards.members),
        sequences=done,
        positions=positions,
        num_bytes=num_bytes,
        column_bytes=sizes,
        rows=tally.rows,
        absent_rows=tally.absent_rows,
        full_rows=full,
        mean_support_mass=tally.mass / present,
        mean_entropy=tally.entropy / present if shards.metadata.has("entropy") else None,
        support_mass_histogram=tuple(tally.histogram),
        example=example,
    )


def _entropy_text(mean: float | None) -> str:
    return "not stored" if mean is None else f"{mean:.4f} nats in the mean"


def _full_rows(rows: Rows) -> int:
    return int((rows.token_ids_PK[:, -1] != PAD_ID).sum())
