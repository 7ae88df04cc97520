"""Shards for other tools: Parquet and Arrow IPC, with the columns of arrow_rows.py.

The schema's metadata says who made the numbers: `teachercache.fingerprint` and `teachercache.metadata` (of the shard)
in JSON, and of a cache `teachercache.teacher_name` and `teachercache.manifest`, the manifest's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .arrow_rows import arrow_schema, to_batch
from .cache_folder import writable
from .canonical import canonical_json
from .errors import SourceError, TargetError
from .part import replacing
from .rows import ScoredSequence
from .shard_set import Report, ShardSet

if TYPE_CHECKING:
    import pyarrow as pa

# of a Parquet row group or an Arrow record batch: some tens of MB
BATCH_ENTRIES = 1 << 22
NOTE = "teachercache."


def export(shards: ShardSet, target: Path, report: Report | None = None) -> int:
    """Write all sequences to `target`, Parquet or Arrow IPC by its suffix; return how many there are.

    Memory is bounded by a batch and one sequence.

    Raises:
        TargetError: the suffix is none of .parquet, .arrow and .feather, or the file cannot be written.
        SourceError: the cache is incomplete.
    """
    open_writer = _WRITERS.get(target.suffix)
    if open_writer is None:
        raise TargetError(f"the suffix of {target} is none of {', '.join(_WRITERS)}")
    manifest = shards.manifest
    if manifest is not None and not manifest.complete:
        held = f"{shards.num_sequences} of {manifest.sequences} sequences"
        raise SourceError(f"{shards.path} holds {held}; export the cache when it is complete")
    schema = arrow_schema(shards.metadata, _notes(shards))
    with writable(target), replacing(target) as file, open_writer(file, schema) as writer:
        for group in _groups(shards.sequences(report)):
            writer.write_batch(to_batch(group, schema))
    return shards.num_sequences


def _notes(shards: ShardSet) -> dict[str, str]:
    notes = {
        "fingerprint": canonical_json(shards.metadata.fingerprint.to_json()).decode(),
        "metadata": shards.metadata.to_bytes().decode(),
    }
    if shards.manifest is not None:
        notes |= {"teacher_name": shards.manifest.teacher_name, "manifest": shards.manifest.digest}
    return {NOTE + name: text for name, text in notes.items()}


def _groups(sequences: Iterator[ScoredSequence]) -> Iterator[list[ScoredSequence]]:
    group: list[ScoredSequence] = []
    entries = 0
    for sequence in sequences:
        group.append(sequence)
        entries += len(sequence) * (2 * sequence.rows.k + sequence.rows.tail_samples)
        if entries >= BATCH_ENTRIES:
            yield group
            group, entries = [], 0
    if group:
        yield group


def _parquet(file: BinaryIO, schema: pa.Schema) -> Any:
    import pyarrow.parquet as pq

    # without page checksums Parquet gives damaged numbers in silence
    return pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True)


def _ipc(file: BinaryIO, schema: pa.Schema) -> Any:
    import pyarrow as pa

    return pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))


_WRITERS: dict[str, Callable[[BinaryIO, pa.Schema], Any]] = {".parquet": _parquet, ".arrow": _ipc, ".feather": _ipc}
