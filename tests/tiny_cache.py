"""A small cache in a folder, as `pull` leaves one, made with numpy alone; and tiny students for it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from format_samples import fingerprint

from teachercache.format_spec import (
    PAD_ID,
    CacheRequest,
    Manifest,
    QualityTally,
    Rows,
    ScoredSequence,
    ShardDescriptor,
    ShardMetadata,
    ShardWriter,
    content_key,
    digest_bytes,
    digest_file,
    tail_uniforms,
)
from teachercache.format_spec.fingerprint import Fingerprint

VOCAB = 97


def rows_of(logits_PV: np.ndarray, k: int, tail_samples: int, uniforms_P: np.ndarray) -> Rows:
    """The rows of a teacher with these logits, by the definitions, in float64."""
    logits_PV = logits_PV.astype(np.float64)
    lse = np.logaddexp.reduce(logits_PV, axis=1)
    logp = logits_PV - lse[:, None]
    order = np.argsort(-logp, axis=1, kind="stable")[:, :k]
    tail = logp.copy()
    np.put_along_axis(tail, order, -np.inf, axis=1)
    log_tail = np.logaddexp.reduce(tail, axis=1)
    draws = np.full((len(logp), tail_samples), PAD_ID, np.int32)
    for i in range(len(logp)):
        cumulative = np.cumsum(np.exp(tail[i] - tail[i].max()))
        points = (uniforms_P[i] + np.arange(tail_samples)) / max(tail_samples, 1) * cumulative[-1]
        draws[i] = np.searchsorted(cumulative, points, side="right")
    return Rows(
        token_ids_PK=order.astype(np.int32),
        logprobs_PK=np.take_along_axis(logp, order, axis=1).astype(np.float32),
        log_tail_mass_P=log_tail.astype(np.float32),
        logsumexp_P=lse.astype(np.float32),
        entropy_P=-(np.exp(logp) * logp).sum(axis=1).astype(np.float32),
        tail_token_ids_PN=draws if tail_samples else None,
    )


def tiny_sequences(count: int = 24, *, k: int = 8, tail_samples: int = 4, seed: int = 0) -> list[ScoredSequence]:
    """Sequences of a teacher that is a fixed bigram table: something that a student can learn."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(99).normal(size=(VOCAB, VOCAB)) * 3
    sequences = []
    for _ in range(count):
        ids = rng.integers(0, VOCAB, int(rng.integers(5, 20))).astype(np.int32)
        uniforms = tail_uniforms(0, content_key(ids), len(ids) - 1)
        sequences.append(
            ScoredSequence(ids, rows_of(table[ids[:-1]], k, tail_samples, uniforms), rng.random(len(ids)) < 0.9)
        )
    return sequences


def write_cache(
    folder: Path,
    sequences: list[ScoredSequence],
    *,
    shards: int = 3,
    tokenizer: str | None = None,
    maker: Fingerprint | None = None,
) -> Path:
    """Write a complete cache of these sequences to `folder`."""
    rows = sequences[0].rows
    if maker is None:
        maker = replace(fingerprint(VOCAB), **({"tokenizer": tokenizer} if tokenizer else {}))
    request = CacheRequest(
        teacher=maker.teacher,
        data=digest_bytes(b"data"),
        engine="transformers",
        dtype="float32",
        head_dtype="float32",
        k=rows.k,
        min_prob="0",
        tail_samples=rows.tail_samples,
        seed=0,
        profile="bf16",
        shard_positions=1000,
    )
    (folder / "shards").mkdir(parents=True)
    tally, descriptors = QualityTally(), []
    bounds = np.linspace(0, len(sequences), shards + 1).astype(int)
    for first, last in pairwise(bounds):
        path = folder / "shards" / "new"
        with path.open("wb") as file:
            writer = ShardWriter(file, ShardMetadata(maker, rows.k, rows.tail_samples))
            for item in sequences[first:last]:
                writer.add(item)
                tally.add(item.rows)
            size = writer.finish()
        digest = digest_file(path)
        path.rename(folder / "shards" / f"{digest.removeprefix('sha256:')}.tkc")
        descriptors.append(ShardDescriptor(digest, size, int(first), int(last - first), writer.num_positions))
    manifest = Manifest(request, maker, "tiny", len(sequences), True, tuple(descriptors), tally.quality())
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder


def tiny_model(kind: str = "llama", vocab_size: int = VOCAB, layers: int = 2, **settings: Any) -> Any:
    """A randomly initialised causal LM of a few thousand parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    usual = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    names = {
        "llama": usual,
        "qwen3": usual | {"head_dim": 8},
        "gemma2": usual | {"head_dim": 8},
        "cohere": usual,
        "granite": usual,
        "phi": {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
        "gpt2": {"n_embd": 16, "n_head": 2, "n_inner": 32, "n_positions": 64},
        "opt": {"hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    }[kind]
    config = AutoConfig.for_model(
        kind, vocab_size=vocab_size, num_hidden_layers=layers, **(names | settings), bos_token_id=1, eos_token_id=2
    )
    return AutoModelForCausalLM.from_config(config)


def save_student(folder: Path, model: Any | None = None, tokenizer: dict[str, Any] | None = None) -> Path:
    """Save a tiny student with a tokenizer file of its own."""
    (model or tiny_model()).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or {"model": {"vocab": {}}, "version": "1.0"}))
    return folder
