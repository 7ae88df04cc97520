"""Random but valid rows for tests of the format; not a test itself."""

from __future__ import annotations

import io

import numpy as np

from teachercache.format_spec import PAD_ID, Fingerprint, Rows, ScoredSequence, ShardMetadata, ShardWriter, digest_bytes


def fingerprint(vocab_size: int = 1000) -> Fingerprint:
    return Fingerprint(
        teacher=digest_bytes(b"teacher"),
        tokenizer=digest_bytes(b"tokenizer"),
        vocab_size=vocab_size,
        engine="transformers",
        dtype="float32",
        head_dtype="float32",
        device="cpu",
        kernel="test",
        software={"torch": "0"},
    )


def sequence(
    seed: int = 0,
    length: int = 20,
    *,
    vocab_size: int = 1000,
    k: int = 5,
    tail_samples: int = 4,
    ragged: bool = True,
    absent: float = 0.1,
    no_tail: float = 0.1,
) -> ScoredSequence:
    """A sequence of random distributions: rows with fewer than k entries, absent rows and empty tails among them."""
    rng = np.random.default_rng(seed)
    rows = length - 1
    kept = min(k, vocab_size - (1 if tail_samples else 0))
    token_ids = np.full((rows, k), PAD_ID, np.int32)
    logprobs = np.full((rows, k), -np.inf, np.float32)
    tails = np.full((rows, tail_samples), PAD_ID, np.int32)
    log_tail = np.full(rows, np.nan, np.float32)
    for i in range(rows):
        if rng.random() < absent:
            continue
        count = int(rng.integers(1, kept + 1)) if ragged else kept
        order = rng.permutation(vocab_size)
        token_ids[i, :count] = order[:count]
        logprobs[i, :count] = -np.sort(rng.gamma(1.0, 3.0, count)).astype(np.float32)
        log_tail[i] = -np.inf if rng.random() < no_tail or count == vocab_size else -rng.gamma(1.0, 5.0)
        if tail_samples and log_tail[i] > -np.inf:
            tails[i] = np.sort(rng.choice(order[count:], tail_samples))
    floats = np.where(token_ids[:, 0] == PAD_ID, np.nan, rng.normal(size=rows)).astype(np.float32)
    return ScoredSequence(
        input_ids_L=rng.integers(0, vocab_size, length).astype(np.int32),
        rows=Rows(
            token_ids_PK=token_ids,
            logprobs_PK=logprobs,
            log_tail_mass_P=log_tail,
            logsumexp_P=floats,
            entropy_P=np.abs(floats),
            tail_token_ids_PN=tails if tail_samples else None,
        ),
        loss_mask_L=rng.random(length) < 0.8,
    )


def shard_bytes(*sequences: ScoredSequence, vocab_size: int = 1000, profile: str = "bf16", remap: bool = True) -> bytes:
    """The shard of these sequences."""
    file = io.BytesIO()
    rows = sequences[0].rows
    metadata = ShardMetadata(fingerprint(vocab_size), rows.k, rows.tail_samples, profile)
    writer = ShardWriter(file, metadata, remap=remap)
    for item in sequences:
        writer.add(item)
    writer.finish()
    return file.getvalue()
