"""How small and how fast shards are, on a real teacher's rows, beside Parquet, Arrow IPC and DistillKit.

Bytes count everything in the file. Speeds are of one core, the best of several passes over data in memory. KL is that
of the teacher's distribution over support and tail to the stored one, in nats a row, computed in float64.

DistillKit's layout is decoded by our vectorised reader of it (`distillkit_reader_…`). Its own code is not on PyPI: with
`--distillkit CHECKOUT` it is imported from there and runs in the same run, on the same rows, a sequence a call as our
frames are. `distillkit_decode_tok_s` begins with what is stored and ends with arrays, as our figure does, by the way
its trainer goes: a row of `datasets`, tensors of its lists, its decompressor. `distillkit_decompress_tok_s` is the last
step alone, given tensors. Measured was its compression as public copies of arcee-ai/DistillKit hold it in 2026.
"""

from __future__ import annotations

import io
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _results import arguments, finish

from teachercache.demo.model import ensure_model
from teachercache.demo.text import load_documents, pack_tokens
from teachercache.format_spec import Fingerprint, ScoredSequence, Shard, ShardMetadata, ShardWriter
from teachercache.format_spec.distillkit import decode_ids, decode_logprobs
from teachercache.format_spec.distillkit_config import DistillKitConfig
from teachercache.service.engines import load_engine

WIDE_VOCAB = 201_088
SEQUENCE_LENGTH = 512
PROFILES = ("fp16", "bf16", "m5")
PASSES = 5
BYTE_LISTS = pa.list_(pa.list_(pa.uint8()))
# what DistillKit's README recommends, at k = 100
DISTILLKIT = DistillKitConfig(
    d=WIDE_VOCAB,
    k=100,
    exact_k=16,
    residual_bins=(),
    exact_dtype="bfloat16",
    polynomial_terms=(0, 1, 2, 3, 4, "sqrt"),
    delta_encoding=False,
)


def corpus(tokens: int, tokenizer: Any) -> list[list[int]]:
    """Prose and code in equal parts: Python's documentation topics and its standard library's sources."""
    prose = [document.text for document in load_documents()]
    library = Path(sysconfig.get_path("stdlib"))
    code = (path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))[::5])
    half = tokens // 2
    return [
        sequence
        for texts in (prose, code)
        for sequence in pack_tokens(texts, tokenizer, SEQUENCE_LENGTH, half + SEQUENCE_LENGTH)
    ]


def scored(
    engine: Any, sequences: list[np.ndarray], k: int, tail_samples: int, min_prob: float = 0.0
) -> list[ScoredSequence]:
    """The teacher's rows of all sequences."""
    rows = dict(engine.score(sequences, k=k, tail_samples=tail_samples, seed=0, min_prob=min_prob))
    return [ScoredSequence(sequence, rows[i]) for i, sequence in enumerate(sequences)]


def stretched(items: list[ScoredSequence], ids: np.ndarray) -> list[ScoredSequence]:
    """The same rows with ids spread over a wider vocabulary, order kept."""

    def wide(column: np.ndarray | None) -> np.ndarray | None:
        return None if column is None else np.where(column < 0, column, ids[np.maximum(column, 0)]).astype(np.int32)

    return [
        replace(
            item,
            input_ids_L=wide(item.input_ids_L),
            rows=replace(
                item.rows,
                token_ids_PK=wide(item.rows.token_ids_PK),
                tail_token_ids_PN=wide(item.rows.tail_token_ids_PN),
            ),
        )
        for item in items
    ]


def encoded(items: list[ScoredSequence], fingerprint: Fingerprint, profile: str) -> bytes:
    """The shard of these sequences."""
    file = io.BytesIO()
    rows = items[0].rows
    writer = ShardWriter(file, ShardMetadata(fingerprint, rows.k, rows.tail_samples, profile))
    for item in items:
        writer.add(item)
    writer.finish()
    return file.getvalue()


def kl(items: list[ScoredSequence], stored: Iterable[np.ndarray]) -> np.ndarray:
    """KL of each row: support as given and as stored, both completed by the exact tail mass and normalised."""
    found = []
    for truth, logprobs in zip(items, stored, strict=True):
        tail = np.exp(truth.rows.log_tail_mass_P.astype(np.float64))[:, None]
        p = np.concatenate([np.exp(truth.rows.logprobs_PK.astype(np.float64)), tail], axis=1)
        q = np.concatenate([np.exp(logprobs.astype(np.float64)), tail], axis=1)
        p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
        found.append((p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300)))).sum(axis=1))
    return np.concatenate(found)


def best_seconds(run: Callable[[], object], passes: int = PASSES) -> float:
    """The fastest of several runs."""
    times = []
    for _ in range(passes):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def drain(items: Iterable[object]) -> None:
    """Read everything."""
    for _ in items:
        pass


def as_table(items: list[ScoredSequence]) -> pa.Table:
    """Ids and fp16 logprobs alone, one row a sequence: what a peer's Parquet holds at the least."""
    k = items[0].rows.k
    ids = pa.array([item.rows.token_ids_PK.reshape(-1) for item in items], pa.list_(pa.int32()))
    values = pa.array([item.rows.logprobs_PK.astype(np.float16).reshape(-1) for item in items], pa.list_(pa.float16()))
    return pa.table({"ids": ids, "logprobs": values}).replace_schema_metadata({"k": str(k)})


def parquet(table: pa.Table) -> bytes:
    """Parquet as good as it gets without another layout: BYTE_STREAM_SPLIT, zstd 3, a row group a 64 sequences."""
    file = io.BytesIO()
    pq.write_table(
        table, file, compression="zstd", compression_level=3, use_dictionary=False, row_group_size=64,
        use_byte_stream_split=["ids.list.element", "logprobs.list.element"], write_page_checksum=True,
    )  # fmt: skip
    return file.getvalue()


def read_parquet(data: bytes, k: int) -> None:
    """Decode to arrays: ids as int32, logprobs as float32, page checksums verified."""
    file = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False)
        table.column("ids").combine_chunks().flatten().to_numpy().reshape(-1, k)
        table.column("logprobs").combine_chunks().flatten().to_numpy().reshape(-1, k).astype(np.float32)


def arrow_ipc(table: pa.Table) -> bytes:
    """Arrow IPC with zstd, a batch a 64 sequences."""
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for batch in table.to_batches(max_chunksize=64):
            writer.write_batch(batch)
    return sink.getvalue()


def measure(tokens: int, checkout: Path | None) -> dict[str, Any]:
    """Return every figure; `checkout` is DistillKit's."""
    from tokenizers import Tokenizer

    teacher = ensure_model(lambda line: print(line, file=sys.stderr))
    sequences = [
        np.array(ids, np.int32) for ids in corpus(tokens, Tokenizer.from_file(str(teacher / "tokenizer.json")))
    ]
    count = sum(map(len, sequences))
    engine = load_engine("transformers", teacher, dtype="float32")
    native = engine.fingerprint("sha256:" + "0" * 64, "sha256:" + "0" * 64)
    wide = replace(native, vocab_size=WIDE_VOCAB)
    ids = np.sort(np.random.default_rng(0).choice(WIDE_VOCAB, native.vocab_size, replace=False)).astype(np.int32)

    print(f"scoring {count} tokens, k = 100", file=sys.stderr)
    items = scored(engine, sequences, 100, 0)
    figures: dict[str, Any] = {"tokens": count, "mean_support_mass_100": _mass(items)}
    widths = {"native": (items, native), "201k": (stretched(items, ids), wide)}
    for profile in PROFILES:
        for width, (rows, fingerprint) in widths.items():
            data = encoded(rows, fingerprint, profile)
            figures[f"bytes_per_token_{profile}_{width}"] = len(data) / count
            if width == "201k":
                seconds = best_seconds(lambda data=data: drain(Shard(data)))
                figures[f"decode_tok_s_{profile}"] = count / seconds
                begin = time.perf_counter()
                encoded(rows, fingerprint, profile)
                figures[f"encode_mb_s_{profile}"] = count * 611 / 1e6 / (time.perf_counter() - begin)
        loss = kl(items, (stored.rows.logprobs_PK for stored in Shard(encoded(items, native, profile))))
        figures[f"kl_mean_{profile}"], figures[f"kl_max_{profile}"] = float(loss.mean()), float(loss.max())
    figures["column_bytes_bf16_201k"] = {
        name: size / count for name, size in Shard(encoded(*widths["201k"], "bf16")).column_bytes().items()
    }
    figures |= peers(widths["201k"][0], count)
    if checkout is not None:
        figures |= distillkit(widths["201k"][0], count, checkout)
        figures["decompress_ratio_to_distillkit"] = (
            figures["decode_tok_s_bf16"] / figures["distillkit_decompress_tok_s"]
        )
    for peer in ("parquet", "distillkit") if checkout is not None else ("parquet",):
        figures[f"decode_ratio_to_{peer}"] = figures["decode_tok_s_bf16"] / figures[f"{peer}_decode_tok_s"]
    for peer in ("parquet", "arrow_ipc", "distillkit"):
        figures[f"bytes_ratio_to_{peer}"] = figures["bytes_per_token_bf16_201k"] / figures[f"{peer}_bytes_per_token"]
    for k, min_prob, name in ((16, 0.0, "16_16"), (32, 0.0, "32_16"), (100, 1e-3, "100_16_min_prob_0.001")):
        print(f"scoring {count} tokens, k = {k} with 16 tail samples, min_prob = {min_prob}", file=sys.stderr)
        items = scored(engine, sequences, k, 16, min_prob)
        figures[f"bytes_per_token_{name}_native"] = len(encoded(items, native, "bf16")) / count
        figures[f"bytes_per_token_{name}_201k"] = len(encoded(stretched(items, ids), wide, "bf16")) / count
    return figures


def peers(items: list[ScoredSequence], count: int) -> dict[str, float]:
    """Bytes and speed of other containers for the ids and fp16 logprobs alone, without any of our side columns."""
    table, k = as_table(items), items[0].rows.k
    files = {"parquet": parquet(table), "arrow_ipc": arrow_ipc(table)}
    seconds = best_seconds(lambda: read_parquet(files["parquet"], k))
    sizes = {f"{name}_bytes_per_token": len(data) / count for name, data in files.items()}
    return sizes | {"parquet_decode_tok_s": count / seconds} | distillkit_layout()


def distillkit_layout() -> dict[str, float]:
    """DistillKit's layout, of a fixed size a row, decoded by our vectorised reader of it, not by its own code."""
    rows = 4096
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (rows, DISTILLKIT.id_bytes), np.uint8)
    values = np.zeros((rows, sum(DISTILLKIT.part_bytes)), np.uint8)
    seconds = best_seconds(lambda: (decode_ids(ids, DISTILLKIT), decode_logprobs(values, DISTILLKIT)))
    size = ids.shape[1] + values.shape[1]
    return {"distillkit_bytes_per_token": size, "distillkit_reader_decode_tok_s": rows / seconds}


def distillkit(items: list[ScoredSequence], count: int, checkout: Path) -> dict[str, float]:
    """DistillKit's own code on the same rows, on one thread."""
    import datasets
    import torch

    sys.path.insert(0, str(checkout))
    from distillkit.compression import DistributionQuantizationConfig, LogprobCompressor

    compressor = LogprobCompressor(DistributionQuantizationConfig(**asdict(DISTILLKIT)))
    ids = [torch.from_numpy(item.rows.token_ids_PK.astype(np.int64))[None] for item in items]
    logprobs = [torch.from_numpy(item.rows.logprobs_PK)[None] for item in items]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    encoding = best_seconds(lambda: drain(map(compressor.compress_from_sparse, ids, logprobs)), passes=1)
    packed = list(map(compressor.compress_from_sparse, ids, logprobs))
    decoding = best_seconds(lambda: drain(map(compressor.decompress_to_sparse, packed)))
    columns = {name: pa.array([rows[name][0].tolist() for rows in packed], BYTE_LISTS) for name in packed[0]}
    dataset = datasets.Dataset(pa.table(columns))

    def read() -> None:
        for row in dataset:
            compressor.decompress_to_sparse({name: torch.tensor([row[name]]) for name in row})

    reading = best_seconds(read)
    torch.set_num_threads(threads)
    decoded = list(map(compressor.decompress_to_sparse, packed))
    assert all(torch.equal(a.sort().values, b.sort().values) for a, (b, _) in zip(ids, decoded, strict=True))
    loss = kl(items, (values[0].float().numpy() for _, values in decoded))
    return {
        "distillkit_encode_tok_s": count / encoding,
        "distillkit_decompress_tok_s": count / decoding,
        "distillkit_decode_tok_s": count / reading,
        "distillkit_kl_mean": float(loss.mean()),
        "distillkit_kl_max": float(loss.max()),
    }


def _mass(items: list[ScoredSequence]) -> float:
    return float(np.mean([1 - np.exp(item.rows.log_tail_mass_P).mean() for item in items]))


if __name__ == "__main__":
    parser = arguments("Size and speed of shards beside other containers, on a real teacher's rows.")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens to score (default: 32768)")
    parser.add_argument("--distillkit", type=Path, metavar="CHECKOUT", help="run DistillKit's own code, from there")
    args = parser.parse_args()
    finish("format", measure(args.tokens, args.distillkit), ["numpy", "zstandard", "pyarrow", "torch"], args)
