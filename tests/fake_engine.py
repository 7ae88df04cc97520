"""A worker on a data directory whose engine is told when to fail; its rows follow from the token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt

from teachercache.format_spec import (
    CacheRequest,
    Example,
    Fingerprint,
    Generation,
    Manifest,
    Rows,
    Submission,
    digest_file,
    write_dataset,
)
from teachercache.service.meta import RequestRow
from teachercache.service.settings import Settings
from teachercache.service.sqlite_meta import SqliteMeta
from teachercache.service.store import LocalStore
from teachercache.service.teachers import Teachers
from teachercache.service.worker import Worker

VOCAB_SIZE = 50
MAX_LENGTH = 16
K = 4


@dataclass
class FakeEngine:
    """An engine without a model; `before_row` is called before each sequence is answered."""

    vocab_size: int = VOCAB_SIZE
    max_length: int = MAX_LENGTH
    name: str = "transformers"
    draws_tail_samples: bool = True
    version: str = "1"
    before_row: Callable[[], None] = lambda: None
    scored: list[int] = field(default_factory=list)

    def fingerprint(self, teacher: str, tokenizer: str) -> Fingerprint:
        """Return a fingerprint in which `version` stands for the software."""
        software = {"fake": self.version}
        return Fingerprint(
            teacher, tokenizer, self.vocab_size, self.name, "float32", "float32", "cpu", "none", software
        )

    def score(
        self,
        sequences: Sequence[npt.NDArray[np.integer[Any]]],
        *,
        k: int,
        tail_samples: int,
        seed: int,
        min_prob: float = 0.0,
    ) -> Iterator[tuple[int, Rows]]:
        """Yield rows from the longest sequence to the shortest."""
        for index in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
            self.before_row()
            self.scored.append(len(sequences[index]))
            yield index, fake_rows(sequences[index], k)

    def generate(
        self, prompts: Sequence[npt.NDArray[np.integer[Any]]], settings: Generation, seeds: Sequence[int]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield completions of 1 to `max_tokens` tokens that tell their seed, the last prompt's first."""
        for index in reversed(range(len(prompts))):
            self.before_row()
            length = 1 + seeds[index] % settings.room(len(prompts[index]), MAX_LENGTH)
            yield index, np.full(length, seeds[index] % VOCAB_SIZE)

    def close(self) -> None:
        """Nothing was opened."""


def fake_rows(ids: npt.NDArray[np.integer[Any]], k: int) -> Rows:
    """Return rows that hold the k ids from each token on."""
    support = (ids[:-1, None] + np.arange(k)) % VOCAB_SIZE
    logprobs = np.tile(-np.arange(1, k + 1, dtype=np.float32), (len(support), 1))
    column = np.full(len(support), -0.5, dtype=np.float32)
    return Rows(support.astype(np.int32), logprobs, column, column, -column)


class Bench:
    """A data directory with a teacher's folder (no weights that would load) and one request."""

    def __init__(self, root: Path, sequences: int = 6, shard_positions: int = 20) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        teacher = write_teacher(root / "teacher")
        self.settings = Settings(data_dir=root / "data", teachers={"fake": str(teacher)}, idle_seconds=0)
        self.open()
        random = np.random.default_rng(1)
        examples = [Example(input_ids=random.integers(0, VOCAB_SIZE, 8)) for _ in range(sequences)]
        self.data = self.upload(examples)
        self.spec = self.request_for(self.data, shard_positions=shard_positions)

    def open(self) -> None:
        """Open store and records, as a new process does."""
        self.store = LocalStore(self.settings.data_dir)
        self.meta = SqliteMeta(self.settings.data_dir / "meta.db")

    def upload(self, examples: list[Example]) -> str:
        """Store a data set."""
        path = self.root / "upload.parquet"
        write_dataset(path, examples)
        blob = self.store.put(path.read_bytes())
        self.meta.add_blob(blob, "upload")
        assert blob.digest == digest_file(path)
        return blob.digest

    def request_for(self, data: str, **settings: Any) -> CacheRequest:
        """Return the request for a data set."""
        teacher = Teachers.of(self.settings, self.meta.file_digest).all[0]
        return Submission(teacher="fake", data=data, k=K, tail_samples=0, **settings).resolve(
            teacher=teacher.digest,
            vocab_size=VOCAB_SIZE,
            engine=teacher.engine,
            dtype=teacher.dtype,
            head_dtype=teacher.head_dtype,
            draws_tail_samples=True,
        )

    def worker(self, engine: FakeEngine, stop: Event | None = None) -> Worker:
        """Return a worker that runs `engine`."""
        return Worker(self.settings, self.store, self.meta, stop or Event(), load=lambda *args, **options: engine)

    def submit(self) -> RequestRow:
        """Submit the request."""
        return self.meta.submit(self.spec, "fake")[0]

    def row(self) -> RequestRow:
        """Return the request."""
        return self.meta.request(self.spec.id)


def newest(bench: Bench) -> Manifest:
    """Return the newest manifest of the request."""
    digest = bench.row().manifest
    assert digest is not None
    return Manifest.from_bytes(bench.store.checked_path(digest).read_bytes())


def write_teacher(folder: Path) -> Path:
    """Write the files that tell a teacher, with weights that no engine could load."""
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}, "max_position_embeddings": {MAX_LENGTH}}}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}')
    return folder
