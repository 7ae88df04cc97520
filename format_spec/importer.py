"""Rows that others hold, as shards of ours: exported Parquet, plain Parquet, DistillKit's data sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from .cache_folder import CacheWriter, write_shard
from .canonical import canonical_json
from .constants import FILE_SUFFIX
from .digest import digest_bytes, is_digest
from .distillkit import IDS, LEGACY, VALUES, DistillKitFiles
from .distillkit_config import CONFIG_NAME, DistillKitConfig
from .errors import SourceError
from .fingerprint import Fingerprint
from .metadata import COLUMNS, REQUIRED, Column, ShardMetadata
from .parquet_source import ParquetSource
from .request import DEFAULT_SHARD_POSITIONS, CacheRequest
from .row_files import Maker, RowFiles
from .rows import ScoredSequence
from .shard_set import Report
from .tokenizer_identity import tokenizer_digest

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who made rows that do not say it themselves.

    `teacher` is a digest, or a name that stands for a teacher nobody can check; `tokenizer` a digest or the
    tokenizer's folder; `vocab_size` may be left out where the rows' config tells it.
    """

    teacher: str
    tokenizer: str
    vocab_size: int | None = None

    def fingerprint(self, layout: str, vocab_size: int | None) -> Fingerprint:
        """Return the fingerprint of rows imported from `layout`."""
        size = self.vocab_size or vocab_size
        if size is None:
            raise SourceError("the rows do not tell the size of their vocabulary; name it")
        named = digest_bytes(canonical_json({"imported_teacher": self.teacher}))
        return Fingerprint(
            teacher=self.teacher if is_digest(self.teacher) else named,
            tokenizer=self.tokenizer if is_digest(self.tokenizer) else tokenizer_digest(Path(self.tokenizer)),
            vocab_size=size,
            engine="import",
            dtype=UNKNOWN,
            head_dtype=UNKNOWN,
            device=UNKNOWN,
            kernel=layout,
            software={},
        )


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import read: its layout, how many sequences, and the columns that it left behind."""

    layout: str
    sequences: int
    ignored: tuple[str, ...]


class RowSource(Protocol):
    """Sequences in a layout of others; `columns` are the shard's columns that they fill."""

    layout: str
    k: int
    tail_samples: int
    columns: list[str]
    ignored: list[str]

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def maker(self) -> Maker | None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ScoredSequence]: ...


def import_rows(
    source: Path,
    target: Path,
    *,
    origin: Origin | None = None,
    config: Path | None = None,
    profile: str | None = None,
    shard_positions: int = DEFAULT_SHARD_POSITIONS,
    report: Report | None = None,
) -> Imported:
    """Write the rows of a Parquet file, or of a folder of them, to a cache folder or, ending in .tkc, to one shard.

    `origin` must be given for rows that do not say who made them, and for no others. `config` is DistillKit's, by
    default the one beside its files; `profile` by default that of the exported shard, else bf16. The cache's request
    names the digest of the source as its data. Memory is bounded by a shard.

    Raises:
        SourceError: the source cannot be read, or its origin is not clear.
        InvalidRows: a row breaks a rule; the message names the record.
        TargetError: the target cannot be written, or is a cache already.
    """
    files = ParquetSource(source)
    rows = _row_source(source, files, config)
    fingerprint = _fingerprint(rows, origin)
    metadata = ShardMetadata(
        fingerprint,
        rows.k,
        rows.tail_samples,
        profile or (rows.maker.profile if rows.maker else "bf16"),
        tuple(Column(name, COLUMNS[name][0]) for name in COLUMNS if name in REQUIRED or name in rows.columns),
    )
    if target.suffix == FILE_SUFFIX:
        write_shard(target, metadata, _reporting(rows, report))
    else:
        writer = CacheWriter(target)
        for _, group in groupby(_reporting(rows, report), key=_Cut(shard_positions)):
            writer.add_shard(metadata, group)
        request = _request(metadata, files.digest, shard_positions)
        writer.finish(request, fingerprint, _teacher_name(rows, origin))
    return Imported(rows.layout, len(rows), tuple(rows.ignored))


class _Cut:
    """Gives each sequence the number of its shard: consecutive ones of at most so many tokens together."""

    def __init__(self, shard_positions: int) -> None:
        self._limit = shard_positions
        self._shard = 0
        self._positions = 0

    def __call__(self, sequence: ScoredSequence) -> int:
        if self._positions and self._positions + len(sequence) > self._limit:
            self._shard, self._positions = self._shard + 1, 0
        self._positions += len(sequence)
        return self._shard


def _row_source(source: Path, files: ParquetSource, config: Path | None) -> RowSource:
    if files.has(*LEGACY):
        raise SourceError(f"{source} has DistillKit's legacy layout: logits without a normaliser are no logprobs")
    if files.has(VALUES, IDS):
        folder = source if source.is_dir() else source.parent
        return DistillKitFiles(files, DistillKitConfig.load(config or folder / CONFIG_NAME))
    return RowFiles(files)


def _fingerprint(rows: RowSource, origin: Origin | None) -> Fingerprint:
    if rows.maker is not None:
        if origin is not None:
            raise SourceError("the rows say themselves who made them; leave teacher, tokenizer and vocabulary out")
        return rows.maker.fingerprint
    if origin is None:
        raise SourceError("the rows do not say who made them; name teacher and tokenizer")
    return origin.fingerprint(rows.layout, rows.vocab_size)


def _teacher_name(rows: RowSource, origin: Origin | None) -> str:
    if origin is not None:
        return origin.teacher
    assert rows.maker is not None
    return rows.maker.teacher_name or rows.maker.fingerprint.teacher


def _request(metadata: ShardMetadata, data: str, shard_positions: int) -> CacheRequest:
    maker = metadata.fingerprint
    return CacheRequest(
        teacher=maker.teacher,
        data=data,
        engine=maker.engine,
        dtype=maker.dtype,
        head_dtype=maker.head_dtype,
        k=metadata.k,
        min_prob="0",
        tail_samples=metadata.tail_samples,
        seed=0,
        profile=metadata.profile,
        shard_positions=shard_positions,
    )


def _reporting(rows: RowSource, report: Report | None) -> Iterator[ScoredSequence]:
    for number, sequence in enumerate(rows, 1):
        yield sequence
        if report is not None:
            report(number, len(rows))
