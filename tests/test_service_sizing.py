"""What a dry run says of the bytes, against shards of the real teacher's rows."""

from __future__ import annotations

import io
import pydoc
from pathlib import Path

import numpy as np
import pytest
from test_format_values import request

from teachercache.format_spec import Example, ScoredSequence, Shard, ShardMetadata, ShardWriter
from teachercache.service.engines.tokenizer import Tokenizer
from teachercache.service.engines.transformers import TransformersEngine
from teachercache.service.plan import token_ids
from teachercache.service.sizing import estimate_bytes

DIGEST = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def engine(teacher_dir: Path) -> TransformersEngine:
    return TransformersEngine(teacher_dir, device="cpu")


@pytest.fixture(scope="module")
def ids(teacher_dir: Path) -> np.ndarray:
    """1024 tokens of Python's own documentation."""
    text = pydoc.plain(pydoc.render_doc("argparse"))
    return token_ids(Tokenizer(teacher_dir).encode(Example(text=text)))[:1024]


@pytest.mark.parametrize(
    ("k", "tail_samples", "min_prob"),
    [(16, 16, "0"), (16, 0, "0.01"), (100, 0, "0"), (100, 0, "0.001"), (100, 16, "0.01"), (100, 16, "0.1")],
)
def test_estimated_bytes_are_about_those_of_a_shard(
    k: int, tail_samples: int, min_prob: str, engine: TransformersEngine, ids: np.ndarray
) -> None:
    spec = request(k=k, tail_samples=tail_samples, min_prob=min_prob)
    file = io.BytesIO()
    writer = ShardWriter(file, ShardMetadata(engine.fingerprint(DIGEST, DIGEST), k, tail_samples))
    pieces = np.split(ids, 4)
    for index, rows in engine.score(pieces, k=k, tail_samples=tail_samples, seed=0, min_prob=float(min_prob)):
        writer.add(ScoredSequence(pieces[index], rows))
    writer.finish()
    # without what a shard has once: metadata, and a table as large as the vocabulary
    written = sum(Shard(file.getvalue()).column_bytes().values())
    estimated = estimate_bytes(len(ids), spec)
    assert 0.7 * written < estimated < 1.4 * written


def test_a_least_probability_never_costs_bytes() -> None:
    sizes = [
        estimate_bytes(10**6, request(k=100, min_prob=p)) for p in ("0", "0." + "0" * 31 + "1", "0.001", "0.1", "0.99")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == sizes[1] > sizes[2] > sizes[3] > sizes[4]
    assert sizes[4] == estimate_bytes(10**6, request(k=1))
