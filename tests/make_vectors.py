"""Makes the golden vectors of format_spec/vectors; one that is there already is never written again.

Run as `python tests/make_vectors.py`. Valid ones come with a JSON file of what a reader must find; floats are
written as C's %a. Invalid ones are named after the error they must raise and the rule they break.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import spec_decoder
from format_samples import fingerprint, sequence
from shard_parts import Parts

import teachercache.format_spec
from teachercache.format_spec import Rows, ScoredSequence, ShardMetadata, ShardWriter
from teachercache.format_spec.metadata import COLUMNS, REQUIRED, Column

VECTORS = Path(teachercache.format_spec.__file__).parent / "vectors"
WRITER = "vectors"


def shard(*items: ScoredSequence, remap: bool = True, vocab_size: int = 1000, **metadata: Any) -> bytes:
    """The shard of these sequences; its writer's text never changes."""
    rows = items[0].rows
    file = io.BytesIO()
    about = ShardMetadata(fingerprint(vocab_size), rows.k, rows.tail_samples, writer=WRITER, **metadata)
    writer = ShardWriter(file, about, remap=remap)
    for item in items:
        writer.add(item)
    writer.finish()
    return file.getvalue()


def minimal() -> bytes:
    """Two tokens, one row of one entry, none of the optional columns, no table."""
    rows = Rows(np.array([[7]], np.int32), np.array([[-0.5]], np.float32), np.array([-1.0], np.float32))
    columns = tuple(Column(name, COLUMNS[name][0]) for name in COLUMNS if name in REQUIRED)
    return shard(ScoredSequence(np.array([3, 7], np.int32), rows), remap=False, columns=columns)


def valid() -> dict[str, bytes]:
    """Name and bytes of each valid vector."""
    items = [sequence(i, n) for i, n in enumerate((20, 2, 9))]
    packed = replace(sequence(5, 8), segment_ids_L=np.array([0, 0, 0, 1, 1, 1, 2, 2], np.int32))
    with_segments = tuple(Column(name, COLUMNS[name][0]) for name in COLUMNS)
    return {
        "minimal": minimal(),
        "tail-samples": shard(*items),
        "no-table": shard(*items, remap=False),
        "top-k": shard(*(sequence(i, 9, tail_samples=0) for i in range(2))),
        "fp16": shard(*items, profile="fp16"),
        "m5": shard(*items, profile="m5"),
        "absent-rows": shard(sequence(9, 12, absent=1.0)),
        "no-tail": shard(sequence(9, 12, no_tail=1.0)),
        "whole-vocabulary": shard(sequence(2, 5, vocab_size=4, k=4, tail_samples=0, ragged=False), vocab_size=4),
        "segments": shard(packed, columns=with_segments),
        "newer-minor": Parts.of(minimal()).with_ends(minor=9).with_fields(later="ignored").build(),
    }


def invalid() -> dict[str, bytes]:
    """Name and bytes of each invalid vector; all but the checksums' own have checksums that match."""
    item = sequence(5, ragged=False, absent=0, no_tail=0)
    plain = Parts.of(shard(item, remap=False))
    table = Parts.of(shard(item))
    good = plain.build()
    frame = plain.frames[0]
    return {
        "NotAShard-head-magic": plain.with_head(magic=b"TKCX").build(),
        "NotAShard-trailer-magic": plain.with_trailer(magic=b"TKCX").build(),
        "NotAShard-reserved": plain.with_head(reserved=1).build(),
        "UnsupportedVersion-major": plain.with_ends(major=2).build(),
        "UnsupportedFeature-bit-1": plain.with_ends(features=2).build(),
        "TruncatedShard-extra-byte": good[:16] + b"\0" + good[16:],
        "CorruptFooter-checksum": plain.with_trailer(checksum=0).build(),
        "CorruptFooter-not-filled": plain.with_trailer(table_length=1).build(),
        "CorruptFooter-minor-of-the-head": plain.with_head(minor=1).build(),
        "CorruptMetadata-alignment": plain.with_fields(alignment="row i predicts token i").build(),
        "CorruptMetadata-missing-column": plain.with_fields(columns=plain.fields["columns"][1:]).build(),
        "CorruptMetadata-planes": plain.with_column("logprobs", planes=3).build(),
        "CorruptMetadata-profile": plain.with_fields(profile="fp8").build(),
        "CorruptTable-missing": replace(table, table=b"").build(),
        "CorruptTable-without-feature": replace(plain, table=table.table).build(),
        "CorruptIndex-gap": plain.with_entry(offset=17).build(),
        "CorruptIndex-positions": plain.with_trailer(positions=21).build(),
        "CorruptFrame-checksum": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "CorruptFrame-key": plain.with_entry(key=bytes(8)).build(),
        "CorruptFrame-junk-after-zstd": plain.with_stream("input_ids", frame.streams[0] + b"junk").build(),
        "CorruptFrame-outside-vocabulary": plain.with_integer("token_ids", 3, 1000).build(),
        "CorruptFrame-padding-inside": plain.with_integer("token_ids", 3, 0xFFFFFF).build(),
        "CorruptFrame-order": plain.with_integer("logprobs", 2, 0x8000).build(),
        "CorruptFrame-log-tail-mass": plain.with_integer("log_tail_mass", 2, 0x3F800000).build(),
        "CorruptFrame-loss-mask": plain.with_integer("loss_mask", 2, 2).build(),
        "CorruptFrame-token-twice": plain.with_integer("token_ids", 1, plain.integers("token_ids")[0]).build(),
        "LimitExceeded-k": plain.with_fields(k=4097).build(),
        "LimitExceeded-one-token": plain.with_entry(positions=1).build(),
    }


def readable(value: Any) -> Any:
    """The same with floats as C's %a."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {key: readable(item) for key, item in value.items()}
    return [readable(item) for item in value] if isinstance(value, list) else value


def write(path: Path, data: bytes) -> None:
    """Write a new file; an old one stays."""
    if not path.exists():
        path.write_bytes(data)
        print("made", path.name)


def main() -> None:
    """Write the vectors that are missing."""
    for name in ("valid", "invalid"):
        (VECTORS / name).mkdir(parents=True, exist_ok=True)
    for name, data in valid().items():
        content = json.dumps(readable(spec_decoder.decode(data)._asdict()), indent=1)
        write(VECTORS / "valid" / f"{name}.tkc", data)
        write(VECTORS / "valid" / f"{name}.json", content.encode())
    for name, data in invalid().items():
        write(VECTORS / "invalid" / f"{name}.tkc", data)


if __name__ == "__main__":
    main()
