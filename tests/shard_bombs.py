"""Small shards that declare or unpack to much: a process of its own, whose memory may grow by so many bytes only.

python tests/shard_bombs.py 8388608
"""

from __future__ import annotations

import resource
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace

import zstandard
from format_samples import sequence, shard_bytes
from shard_parts import Parts

from teachercache.format_spec import Shard, ShardError

ZEROS = 1 << 26


def claiming(size: int) -> bytes:
    """A zstd frame that declares this content size and has none."""
    return struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 0x58, size) + bytes([1, 0, 0])


def bombs() -> Iterator[tuple[str, bytes]]:
    """What each does, and its bytes."""
    parts = Parts.of(shard_bytes(sequence(0, 9, tail_samples=2)))
    said = zstandard.ZstdCompressor().compress(bytes(ZEROS))
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(ZEROS))
    streams = {
        "64 MiB": said,
        "64 MiB unsaid": unsaid,
        "2^40": claiming(2**40),
        "2^63": claiming(2**63),
    }
    for column in ("token_ids", "logprobs", "input_ids"):
        for what, stream in streams.items():
            yield f"{column}: {what}", parts.with_stream(column, stream).build()
    every = parts.frames[0].with_streams([said] * len(parts.frames[0].streams))
    yield "each plane: 64 MiB", parts.with_frame(every).build()
    yield "planes: 300 more", with_more(parts, [said] * 300).build()
    yield "table: 64 MiB", replace(parts, table=said).build()
    yield "table: 2^34", replace(parts, table=claiming(2**34)).build()
    yield "metadata: deep", replace(parts, metadata=b"[" * 60_000).build()
    yield "metadata: many", replace(parts, metadata=b'{"a":[' + b"[]," * 20_000 + b"[]]}").build()
    yield "metadata: a long number", replace(parts, metadata=b'{"k":' + b"9" * 60_000 + b"}").build()
    yield "sequences", parts.with_trailer(sequences=2**24, positions=2**25).build()
    yield "rows", parts.with_fields(k=4096).with_entry(0, positions=2**22).with_trailer(positions=2**22).build()


def with_more(parts: Parts, streams: list[bytes]) -> Parts:
    """A shard with a column that no reader knows."""
    column = {"name": "later", "planes": len(streams), "transform": "none"}
    frame = parts.frames[0]
    wider = parts.with_fields(columns=[*parts.fields["columns"], column])
    return wider.with_frame(frame.with_streams([*frame.streams, *streams]))


def skipped() -> bytes:
    """A shard that is as it should be: what unpacks to gigabytes is in a column that is not read."""
    parts = Parts.of(shard_bytes(sequence(0, 9, tail_samples=2)))
    return with_more(parts, [zstandard.compress(bytes(ZEROS))] * 200).build()


def main(spare: int) -> None:
    """Read them all within `spare` bytes more than there are."""
    ready, harmless = list(bombs()), skipped()
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Shard(harmless).verify()
    refused = 0
    for what, data in ready:
        try:
            Shard(data).verify()
            print("accepted:", what)
        except ShardError:
            refused += 1
    print(refused, "refused")


if __name__ == "__main__":
    main(int(sys.argv[1]))
