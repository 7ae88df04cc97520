"""What benchmarks/fidelity.py trains on: real text, and what a cache of each kind keeps of a teacher's rows for it.

Shapes: S sequences, T tokens of each, P = S * (T - 1) rows, K support entries, N tail samples.
"""

from __future__ import annotations

import io
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from teachercache.demo.text import load_documents, split
from teachercache.format_spec import Rows, ScoredSequence, Shard, ShardMetadata, ShardWriter
from teachercache.service.engines.capture import capture
from teachercache.service.engines.transformers import TransformersEngine
from teachercache.trainer.kl import TeacherRows

SHARD_POSITIONS = 262_144
ZEROS = "sha256:" + "0" * 64
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Kind:
    """What a cache keeps of a row, and in which profile."""

    k: int
    tail_samples: int
    profile: str = "bf16"


def texts(held_out: bool) -> Iterator[str]:
    """Python's documentation, then the sources of its standard library; every seventh file is held out."""
    train, heldout = split(load_documents())
    for document in heldout if held_out else train:
        yield document.text
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    for number, path in enumerate(files):
        if "site-packages" in path.parts or "test" in path.parts or (number % 7 == 0) != held_out:
            continue
        yield path.read_text(errors="ignore")


def sequences_of(teacher: Path, count: int, length: int, *, held_out: bool) -> Ids:
    """Return [S, T] token ids, cut from texts one after the other.

    Raises:
        ValueError: there is less text.
    """
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    found: list[list[int]] = []
    for text in texts(held_out):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found += [ids[begin : begin + length] for begin in range(0, len(ids) - length + 1, length)]
        if len(found) >= count:
            return np.array(found[:count], np.int32)
    raise ValueError(f"the text of this Python gives {len(found)} sequences of {length} tokens, {count} are asked for")


def teacher_rows(teacher: Path, ids_ST: Ids, kinds: list[Kind], seed: int) -> dict[Kind, list[Rows]]:
    """Return each sequence's rows of each kind, of one pass of the teacher over the text."""
    on_gpu = torch.cuda.is_available()
    engine = TransformersEngine(teacher, dtype="bfloat16" if on_gpu else "float32")
    shapes = sorted({(kind.k, kind.tail_samples) for kind in kinds})
    parts: dict[tuple[int, int], list[Rows]] = {shape: [] for shape in shapes}

    def to_rows(logits_PV: Tensor, *, uniforms_P: npt.NDArray[np.float64]) -> Rows:
        for k, tail_samples in shapes:
            parts[k, tail_samples].append(
                capture(logits_PV, k=k, tail_samples=tail_samples, uniforms_P=uniforms_P, min_prob=0.0)
            )
        return parts[shapes[0]][-1]

    # sequences of one length are scored in their order
    order = [index for index, _ in engine._score(list(ids_ST), to_rows, seed)]
    assert order == list(range(len(ids_ST)))
    rows = ids_ST.shape[1] - 1
    found = {}
    for shape, blocks in parts.items():
        whole = Rows.concatenate(blocks)
        found[shape] = [whole[begin : begin + rows] for begin in range(0, len(whole), rows)]
    return {kind: found[kind.k, kind.tail_samples] for kind in kinds}


class Cached:
    """The rows of one kind, written into shards and read back, on the device that trains."""

    def __init__(self, ids_ST: Ids, rows: list[Rows], kind: Kind, vocab_size: int, device: str) -> None:
        fingerprint = fingerprint_of(vocab_size)
        per_shard = max(1, SHARD_POSITIONS // ids_ST.shape[1])
        begins = range(0, len(ids_ST), per_shard)

        def written(begin: int) -> tuple[int, list[Rows]]:
            file = io.BytesIO()
            writer = ShardWriter(file, ShardMetadata(fingerprint, kind.k, kind.tail_samples, kind.profile))
            for ids, own in zip(ids_ST[begin : begin + per_shard], rows[begin : begin + per_shard], strict=True):
                writer.add(ScoredSequence(ids, own))
            writer.finish()
            return len(file.getvalue()), [sequence.rows for sequence in Shard(file.getvalue())]

        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(written, begins))
        self.bytes_per_token = sum(size for size, _ in done) / ids_ST.size
        whole = Rows.concatenate([own for _, shard in done for own in shard])
        self._rows = ids_ST.shape[1] - 1
        self._columns: dict[str, Tensor | None] = {
            "token_ids_PK": torch.from_numpy(whole.token_ids_PK),
            "logprobs_PK": torch.from_numpy(whole.logprobs_PK),
            "log_tail_mass_P": torch.from_numpy(whole.log_tail_mass_P),
            "tail_token_ids_PN": None if whole.tail_token_ids_PN is None else torch.from_numpy(whole.tail_token_ids_PN),
            "entropy_P": torch.from_numpy(whole.entropy_P),
        }
        self._device = device

    def batch(self, sequences: npt.NDArray[np.int64]) -> TeacherRows:
        """Return the rows of these sequences, one after the other."""
        places = (sequences[:, None] * self._rows + np.arange(self._rows)).ravel()
        index = torch.from_numpy(places)
        columns: dict[str, Any] = {
            name: None if column is None else column[index].to(self._device) for name, column in self._columns.items()
        }
        return TeacherRows(**columns)


def fingerprint_of(vocab_size: int) -> Any:
    """A fingerprint for shards that nobody else reads."""
    from teachercache.format_spec import Fingerprint

    return Fingerprint(ZEROS, ZEROS, vocab_size, "transformers", "float32", "float32", "cpu", "benchmark", {})
