"""A second reader of shards, slow and obvious, written from `format_spec/SPEC.md` alone; it imports nothing of ours.

The numbers in its errors are clauses of that text.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash
import zstandard

REMAP = 1
PADDING = 0xFFFFFF
LIMITS = {
    "metadata": (0, 65_536),
    "vocab_size": (1, 2**24 - 1),
    "k": (1, 4096),
    "tail_samples": (0, 4096),
    "sequences": (1, 2**24),
    "tokens": (2, 2**22),
    "plane": (0, 2**30),
}
PROFILES: dict[str, tuple[int, Callable[[int], float]]] = {
    "fp16": (0x7C00, lambda code: float(np.uint16(code).view(np.float16))),
    "bf16": (0x7F80, lambda code: f32(code << 16)),
    "m5": (0x1FE0, lambda code: f32(code << 18)),
}
CONSTANTS = {
    "alignment": "row i predicts token i + 1",
    "ties": "logprob descending, the teacher's ties by id ascending",
    "value": "logprob",
}
FINGERPRINT_TEXTS = {"engine", "dtype", "head_dtype", "device", "kernel"}
COLUMNS = {
    "input_ids": (3, "ids"),
    "loss_mask": (1, "inverted"),
    "segment_ids": (3, "none"),
    "token_ids": (3, "ids"),
    "logprobs": (2, "profile, row delta"),
    "log_tail_mass": (4, "float32"),
    "logsumexp": (4, "float32"),
    "entropy": (4, "float32"),
    "tail_token_ids": (3, "ids, ascending, row delta"),
}
FLOATS = ("log_tail_mass", "logsumexp", "entropy")
REQUIRED_COLUMNS = {"input_ids", "loss_mask", "token_ids", "logprobs", "log_tail_mass"}


class SpecError(Exception):
    """A rule of the text is broken; `name` is the error that the text gives for it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name


class Decoded(NamedTuple):
    metadata: dict[str, Any]
    sequences: list[dict[str, Any]]


def decode(data: bytes) -> Decoded:
    """The whole shard; a row is an object of its values, or None where it is absent."""
    features = check_head(data)
    footer_offset, metadata_end, table_end, positions = check_trailer(data, features)
    metadata = parse_metadata(data[footer_offset:metadata_end])
    ids = parse_table(data[metadata_end:table_end], features, metadata["fingerprint"]["vocab_size"])
    entries = parse_index(data[table_end:-64], footer_offset, positions, metadata)
    return Decoded(metadata, [decode_frame(data, entry, metadata, ids) for entry in entries])


def check(holds: bool, name: str, why: str) -> None:
    if not holds:
        raise SpecError(name, why)


def check_limit(what: str, value: int) -> None:
    least, most = LIMITS[what]
    check(least <= value <= most, "LimitExceeded", f"9 {what} {value}")


def f32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def check_head(data: bytes) -> int:
    check(len(data) >= 16 and data[:4] == b"TKCS", "NotAShard", "3.1")
    major, _, features, reserved = struct.unpack("<HHII", data[4:16])
    check(major == 1, "UnsupportedVersion", "3.2")
    check(features & ~REMAP == 0, "UnsupportedFeature", "3.3")
    check(reserved == 0, "NotAShard", "3.4")
    return int(features)


def check_trailer(data: bytes, features: int) -> tuple[int, int, int, int]:
    """Where the footer, the table and the index begin, and the positions of all sequences."""
    check(len(data) >= 64 and data[-4:] == b"TKCE", "NotAShard", "8.1")
    offset, metadata_length, table_length, sequences, positions, checksum, size, *agreed = struct.unpack(
        "<QIIQQQQI4sI", data[-64:-4]
    )
    check(size == len(data), "TruncatedShard", "8.2")
    check(agreed == [features, data[4:8], 0], "CorruptFooter", "8.3")
    check_limit("sequences", sequences)
    check_limit("metadata", metadata_length)
    check(offset >= 16, "CorruptFooter", "8.5")
    check(offset + metadata_length + table_length + 32 * sequences == len(data) - 64, "CorruptFooter", "8.5")
    check(xxhash.xxh3_64_intdigest(data[offset:-64]) == checksum, "CorruptFooter", "8.5")
    return offset, offset + metadata_length, offset + metadata_length + table_length, positions


def parse_metadata(text: bytes) -> dict[str, Any]:
    def refuse(number: str) -> NoReturn:
        raise SpecError("CorruptMetadata", f"6.1 {number}")

    try:
        metadata = json.loads(text.decode(), parse_float=refuse, parse_constant=refuse)
        canonical = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
        values = list(walk(metadata, 1))
    except (ValueError, RecursionError) as error:
        raise SpecError("CorruptMetadata", "6.1 JSON") from error
    check(isinstance(metadata, dict) and canonical == text, "CorruptMetadata", "6.1 canonical")
    for value in values:
        check(not isinstance(value, int) or abs(value) < 2**53, "CorruptMetadata", "6.1 integers")
        check(not isinstance(value, dict) or all(map(str.isascii, value)), "CorruptMetadata", "6.1 keys")
    check(all(metadata.get(key) == text for key, text in CONSTANTS.items()), "CorruptMetadata", "6.2 constants")
    check(isinstance(metadata.get("writer"), str), "CorruptMetadata", "6.2 writer")
    check(str(metadata.get("profile")) in PROFILES, "CorruptMetadata", "6.4")
    check_fingerprint(metadata.get("fingerprint"))
    check_counts(metadata, "k", "tail_samples")
    check_columns(metadata.get("columns"), metadata["tail_samples"])
    return metadata


def walk(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list):
        check(depth <= 64, "CorruptMetadata", "6.1 depth")
        for item in value.values() if isinstance(value, dict) else value:
            yield from walk(item, depth + 1)


def check_counts(holder: dict[str, Any], *names: str) -> None:
    for name in names:
        check(type(holder.get(name)) is int, "CorruptMetadata", f"6.2 {name}")
        check_limit(name, holder[name])


def check_fingerprint(fingerprint: Any) -> None:
    keys = FINGERPRINT_TEXTS | {"teacher", "tokenizer", "vocab_size", "software"}
    check(isinstance(fingerprint, dict) and set(fingerprint) == keys, "CorruptMetadata", "6.3 keys")
    for key in ("teacher", "tokenizer"):
        check(bool(re.fullmatch("sha256:[0-9a-f]{64}", str(fingerprint[key]))), "CorruptMetadata", f"6.3 {key}")
    check(isinstance(fingerprint["software"], dict), "CorruptMetadata", "6.3 software")
    texts = [fingerprint[key] for key in FINGERPRINT_TEXTS] + list(fingerprint["software"].values())
    check(all(isinstance(text, str) for text in texts), "CorruptMetadata", "6.3 texts")
    check_counts(fingerprint, "vocab_size")


def check_columns(columns: Any, tail_samples: int) -> None:
    check(isinstance(columns, list) and all(isinstance(one, dict) for one in columns), "CorruptMetadata", "6.5 objects")
    for column in columns:
        name, planes, transform = (column.get(key) for key in ("name", "planes", "transform"))
        check(isinstance(name, str) and isinstance(transform, str), "CorruptMetadata", "6.5 texts")
        check(type(planes) is int and planes > 0, "CorruptMetadata", "6.5 planes")
        check(COLUMNS.get(name, (planes, transform)) == (planes, transform), "CorruptMetadata", f"6.5 {name}")
    names = {column["name"] for column in columns}
    required = REQUIRED_COLUMNS | ({"entropy", "tail_token_ids"} if tail_samples else set())
    check(len(names) == len(columns) and required <= names, "CorruptMetadata", "6.5 names")
    check(tail_samples > 0 or "tail_token_ids" not in names, "CorruptMetadata", "6.5 tail_token_ids")
    check(sum(column["planes"] for column in columns) <= 256, "CorruptMetadata", "9 streams")


def parse_table(stream: bytes, features: int, vocab_size: int) -> list[int] | range:
    """The id of each code."""
    if not features & REMAP:
        check(stream == b"", "CorruptTable", "5.1")
        return range(vocab_size)
    classes = np.frombuffer(unzstd(stream, vocab_size, "CorruptTable"), np.uint8)
    ids: list[int] = np.argsort(-classes.astype(int), kind="stable").tolist()
    return ids


def unzstd(stream: bytes, size: int, error: str) -> bytes:
    """The content of a stream that is exactly one zstd frame of this declared size."""
    check(stream[:4] == b"\x28\xb5\x2f\xfd", error, "4.2 magic")
    try:
        header = zstandard.get_frame_parameters(stream)
        check(header.content_size == size and header.dict_id == 0, error, "4.2 declared size, dictionary")
        check(header.window_size <= 2**23, error, "9 window")
        content = zstandard.ZstdDecompressor().decompress(stream, allow_extra_data=False)
    except zstandard.ZstdError as broken:
        raise SpecError(error, "4.2 zstd") from broken
    check(len(content) == size, error, "4.2 size")
    return content


class Entry(NamedTuple):
    offset: int
    length: int
    positions: int
    key: bytes
    checksum: int


def parse_index(index: bytes, footer_offset: int, positions: int, metadata: dict[str, Any]) -> list[Entry]:
    entries = [Entry(*fields) for fields in struct.iter_unpack("<QII8sQ", index)]
    end = 16
    for entry in entries:
        check(entry.offset == end, "CorruptIndex", "7.2 tiling")
        end += entry.length
        check_limit("tokens", entry.positions)
        check_limit("plane", (entry.positions - 1) * max(metadata["k"], metadata["tail_samples"]))
    check(end == footer_offset, "CorruptIndex", "7.2 tiling")
    check(sum(entry.positions for entry in entries) == positions, "CorruptIndex", "7.2 positions")
    return entries


def decode_frame(data: bytes, entry: Entry, metadata: dict[str, Any], ids: list[int] | range) -> dict[str, Any]:
    frame = data[entry.offset : entry.offset + entry.length]
    check(xxhash.xxh3_64_intdigest(frame) == entry.checksum, "CorruptFrame", "7.3")
    columns = read_columns(frame, entry.positions, metadata)
    sequence: dict[str, Any] = {"input_ids": to_ids(columns["input_ids"], ids)}
    content_key = hashlib.sha256(struct.pack(f"<{entry.positions}I", *sequence["input_ids"])).digest()
    check(content_key[:8] == entry.key, "CorruptFrame", "7.2 key")
    check(set(columns["loss_mask"]) <= {0, 1}, "CorruptFrame", "4.4 loss_mask")
    sequence["loss_mask"] = [mask == 0 for mask in columns["loss_mask"]]
    if "segment_ids" in columns:
        check(max(columns["segment_ids"]) < PADDING, "CorruptFrame", "4.4 segment_ids")
        sequence["segment_ids"] = columns["segment_ids"]
    sequence["rows"] = [decode_row(row, columns, metadata, ids) for row in range(entry.positions - 1)]
    return sequence


def to_ids(codes: list[int], ids: list[int] | range) -> list[int]:
    check(max(codes, default=0) < len(ids), "CorruptFrame", "4.4 or 4.7 vocabulary")
    return [ids[code] for code in codes]


def read_columns(frame: bytes, positions: int, metadata: dict[str, Any]) -> dict[str, list[int]]:
    """The stored integers of each known column."""
    num_streams = sum(column["planes"] for column in metadata["columns"])
    end = 8 + 4 * num_streams
    check(len(frame) >= end, "CorruptFrame", "4.1 too short")
    check(struct.unpack("<IHH", frame[:8]) == (positions, num_streams, 0), "CorruptFrame", "4.1 counts")
    streams = []
    for length in struct.unpack(f"<{num_streams}I", frame[8:end]):
        streams.append(frame[end : end + length])
        end += length
    check(end == len(frame), "CorruptFrame", "4.1 filled")
    rows = positions - 1
    sizes = dict.fromkeys(("input_ids", "loss_mask", "segment_ids"), positions) | dict.fromkeys(FLOATS, rows)
    sizes |= dict.fromkeys(("token_ids", "logprobs"), rows * metadata["k"])
    sizes["tail_token_ids"] = rows * metadata["tail_samples"]
    columns = {}
    for column in metadata["columns"]:
        mine, streams = streams[: column["planes"]], streams[column["planes"] :]
        if size := sizes.get(column["name"]):
            planes = [unzstd(stream, size, "CorruptFrame") if stream else bytes(size) for stream in mine]
            columns[column["name"]] = [int.from_bytes(digits, "little") for digits in zip(*planes, strict=True)]
    return columns


def decode_row(row: int, columns: dict[str, list[int]], metadata: dict[str, Any], ids: Any) -> dict[str, Any] | None:
    k, tail_samples = metadata["k"], metadata["tail_samples"]
    infinity, magnitude = PROFILES[metadata["profile"]]
    support = columns["token_ids"][row * k : (row + 1) * k]
    entries = support.index(PADDING) if PADDING in support else k
    token_ids = to_ids(support[:entries], ids)
    check(set(support[entries:]) <= {PADDING}, "CorruptFrame", "4.4 padding")
    check(len(set(token_ids)) == entries, "CorruptFrame", "4.4 twice")
    codes = [int(code) % 2**16 for code in np.cumsum(columns["logprobs"][row * k : (row + 1) * k])]
    check(codes == sorted(codes), "CorruptFrame", "4.5 order")
    check(max(codes[:entries], default=0) < infinity, "CorruptFrame", "4.5 infinity")
    check(set(codes[entries:]) <= {infinity}, "CorruptFrame", "4.5 padding")
    drawn = np.cumsum(columns.get("tail_token_ids", [])[row * tail_samples : (row + 1) * tail_samples], dtype=int)
    bits = {name: columns[name][row] for name in FLOATS if name in columns}
    floats = {name: f32(pattern) for name, pattern in bits.items()}
    if entries == 0:
        check(not any(bits.values()), "CorruptFrame", "4.8")
    else:
        check(floats["log_tail_mass"] <= float(np.float32(0.001)), "CorruptFrame", "4.6 log_tail_mass")
        check(all(math.isfinite(floats[name]) for name in {*floats} - {"log_tail_mass"}), "CorruptFrame", "4.6 finite")
    if entries == 0 or floats["log_tail_mass"] == -math.inf:
        check(set(drawn.tolist()) <= {PADDING}, "CorruptFrame", "4.7 no draws")
        drawn = drawn[:0]
    tail_token_ids = sorted(to_ids(drawn.tolist(), ids))
    check(not set(tail_token_ids) & set(token_ids), "CorruptFrame", "4.7 in the support")
    if entries == 0:
        return None
    values = {"token_ids": token_ids, "logprobs": [-magnitude(code) for code in codes[:entries]]} | floats
    return values | ({"tail_token_ids": tail_token_ids} if tail_samples else {})
