"""The demo: a real teacher answers over HTTP once, then a student learns from the cache alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..client import Client, RequestView
from ..format_spec import FORMAT_VERSION, Example, Manifest, write_dataset
from ..format_spec.progress import progress
from ..format_spec.request import SPEC_VERSION
from .evaluate import Score, evaluate
from .model import default_cache_dir, ensure_model
from .peak import measure, save_inputs
from .report import Report, draw
from .server import serve, wait_until_teacher_left
from .text import load_documents, pack_tokens, split

TEACHER = "smollm2-135m"
Say = Callable[[str], None]
Tokens = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Sizes of the demo; the defaults take a few minutes on two cores."""

    folder: Path
    train_tokens: int = 20_480
    heldout_tokens: int = 4_096
    sequence_length: int = 256
    k: int = 16
    tail_samples: int = 16
    shards: int = 4
    batch_size: int = 2
    epochs: int = 2
    learning_rate: float = 8e-4


# raised when a data directory that an unreleased version made cannot be read
GENERATION = 4


def default_folder() -> Path:
    """Return where the demo keeps its cache and its students; one of another format or other requests is of no use."""
    return default_cache_dir() / f"demo-{FORMAT_VERSION}-{SPEC_VERSION}-{GENERATION}"


def run_demo(config: DemoConfig, say: Say) -> Report:
    """Run the demo and return its figures; `say` gets a line before each part.

    Raises:
        TeachercacheError: what a part of it could not do.
    """
    started = time.perf_counter()
    teacher = ensure_model(say)
    train, heldout = tokens_of(teacher, config)
    say(f"text: {_count(train):,} tokens of Python's own documentation to train on, {_count(heldout):,} held out")
    untrained = _make_student(teacher, config.folder / "students")
    with serve(TEACHER, teacher, config.folder / "server") as url, Client(url) as client:
        view, scored = _fill_cache(client, train, config, say)
        wait_until_teacher_left(url)
        say("the teacher's process is gone; two students learn, one from the cache, one from the text's labels")
        runs = {
            name: _train(name, url, view.id, untrained, config, ce_weight)
            for name, ce_weight in (("from the cache", 0.0), ("from labels only", 1.0))
        }
        manifest = client.manifest(view.id)
        client.pull(view.id, config.folder / "pulled" / view.id)
    say("comparing them with the live teacher on the held-out text, over the full vocabulary")
    scores = _scores(teacher, [untrained, *(run.student for run in runs.values())], heldout)
    peaks = _peaks(untrained, config.folder / "pulled" / view.id)
    seconds = time.perf_counter() - started
    report = _report(manifest, view, scored, runs["from the cache"].tokens_per_s, scores, peaks, seconds)
    draw(report, runs, config.folder / "demo.png")
    return report


def tokens_of(teacher: Path, config: DemoConfig) -> tuple[Tokens, Tokens]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    sides = zip(split(load_documents()), (config.train_tokens, config.heldout_tokens), strict=True)
    train, heldout = (
        pack_tokens((document.text for document in side), tokenizer, config.sequence_length, limit)
        for side, limit in sides
    )
    return train, heldout


def _make_student(teacher: Path, folder: Path) -> Path:
    """Save a student of every other layer of the teacher: from here on nobody needs the teacher's folder."""
    from ..trainer import Student

    shutil.rmtree(folder, ignore_errors=True)
    with _quiet():
        whole = Student.load(str(teacher), device="cpu")
        depth = whole.model.config.num_hidden_layers
        Student.load(str(teacher), device="cpu", keep_layers=range(0, depth, 2)).save(folder / "untrained")
    return folder / "untrained"


def _fill_cache(client: Client, train: Tokens, config: DemoConfig, say: Say) -> tuple[RequestView, int]:
    """Ask for the cache and wait for it; return the request and the tokens that the teacher ran for it now."""
    import numpy as np

    data = config.folder / "train.parquet"
    write_dataset(data, (Example(input_ids=np.array(ids)) for ids in train))
    view = client.submit(
        teacher=TEACHER,
        data=client.upload(data),
        k=config.k,
        tail_samples=config.tail_samples,
        shard_positions=-(-_count(train) // config.shards),
    )
    if view.state == "failed":
        view = client.retry(view.id)
    scored_before = view.teacher_tokens_scored
    if view.state == "complete":
        say(f"cache {view.id[:12]} is there from an earlier run; the teacher is not started")
    else:
        kept = f"top {config.k} and {config.tail_samples} tail samples"
        say(f"request {view.id[:12]}: the teacher scores the text once, {kept} a position")
        with progress("capture") as report:
            view = client.wait(view.id, on_progress=lambda v: report(v.positions_done, v.positions_total, _note(v)))
    return view, view.teacher_tokens_scored - scored_before


def _note(view: RequestView) -> str:
    return f"{view.state} {view.tokens_per_s:,.0f} tokens/s" if view.tokens_per_s else view.state


def _train(name: str, url: str, cache: str, student: Path, config: DemoConfig, ce_weight: float) -> Any:
    from ..trainer import TrainConfig, train
    from ..trainer.commands import step_progress

    settings = TrainConfig(
        student=str(student),
        cache=cache,
        url=url,
        output=student.parent / name.replace(" ", "-"),
        ce_weight=ce_weight,
        batch_size=config.batch_size,
        epochs=config.epochs,
        learning_rate=config.learning_rate,
        device="cpu",
        checkpoint_every=1000,
    )
    with _quiet(), step_progress(f"student {name}") as on_step:
        return train(settings, on_step)


def _scores(teacher: Path, students: Sequence[Path], heldout: Tokens) -> list[Score]:
    with _quiet(), progress("evaluation") as report:
        return evaluate(teacher, students, heldout, lambda done, total: report(done, total, "sequences"))


def _peaks(student: Path, pulled: Path) -> tuple[float, float]:
    inputs = student.parent / "peak.pt"
    with _quiet():
        save_inputs(student, pulled, inputs)
    peaks = measure(inputs, "fused"), measure(inputs, "dense")
    inputs.unlink()
    return peaks


def _report(
    manifest: Manifest,
    view: RequestView,
    scored: int,
    train_tok_s: float,
    scores: Sequence[Score],
    peaks: tuple[float, float],
    seconds: float,
) -> Report:
    before, after, labels_only = scores
    return Report(
        heldout_kl_before=before.kl,
        heldout_kl_after=after.kl,
        heldout_kl_labels_only=labels_only.kl,
        ppl_before=before.perplexity,
        ppl_after=after.perplexity,
        ppl_labels_only=labels_only.perplexity,
        bytes_per_token=manifest.num_bytes / manifest.num_positions,
        cache_tokens=manifest.num_positions,
        shards=len(manifest.shards),
        k=manifest.request.k,
        tail_samples=manifest.request.tail_samples,
        mean_support_mass=float(manifest.quality.mean_support_mass),
        capture_tok_s=manifest.num_positions / _seconds(view),
        train_tok_s=train_tok_s,
        teacher_tokens_scored=scored,
        loss_peak_mb=peaks[0],
        dense_loss_peak_mb=peaks[1],
        seconds=seconds,
    )


def _seconds(view: RequestView) -> float:
    """From the request to its last shard, the teacher's loading included."""
    created, updated = (datetime.fromisoformat(moment) for moment in (view.created_at, view.updated_at))
    return max((updated - created).total_seconds(), 1e-3)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own progress bars out of ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _count(sequences: Tokens) -> int:
    return sum(len(sequence) for sequence in sequences)
