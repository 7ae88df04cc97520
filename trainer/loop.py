"""The training loop: stream, forward, fused loss, step.

Shapes: B sequences, T tokens, H hidden size, R rows that count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..client import TopkBatch, TopkStream, stream_topk
from .batch import micro_batches, to_tensors
from .checkpoint import load_checkpoint, save_checkpoint
from .config import TrainConfig
from .errors import Diverged, NothingToTrainOn
from .kl import KLStats, topk_kl
from .metrics import MetricsFile, StepMetrics, plot_loss, read_metrics
from .student import Student

OnStep = Callable[[StepMetrics, int], None]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a finished run leaves: the student's folder, its metrics and how fast it went."""

    student: Path
    metrics: Path
    plot: Path
    steps: int
    tokens: int
    tokens_per_s: float


def train(config: TrainConfig, on_step: OnStep | None = None) -> TrainResult:
    """Train a student from a cache, continuing from the newest checkpoint in the output folder.

    `on_step` is called after each step with its metrics and the number of steps in all.

    Raises:
        TrainerError: a setting, student, cache or checkpoint that cannot work.
        ClientError: the cache cannot be had.
    """
    device = _device(config.device)
    # a folder needs no server
    where = (config.cache, None) if Path(config.cache).is_dir() else (config.url, config.cache)
    with stream_topk(*where, batch_size=config.batch_size, seed=config.seed, epochs=config.epochs) as stream:
        student = Student.load(config.student, device=device, keep_layers=config.keep_layers)
        student.check_vocabulary(stream.manifest)
        if config.check_tokenizer:
            student.check_tokenizer(stream.manifest)
        return _Run(config, student, stream, device).finish(on_step)


class _Run:
    """A run in progress."""

    def __init__(self, config: TrainConfig, student: Student, stream: TopkStream, device: str) -> None:
        torch.manual_seed(config.seed)
        self.config, self.student, self.stream, self.device = config, student, stream, device
        self.steps = min(len(stream), config.max_steps or len(stream))
        self.step = self.tokens = 0
        parameters = [p for p in student.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters, config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.identity = config.identity() | {"manifest": stream.manifest.digest}
        self._resume()

    def finish(self, on_step: OnStep | None) -> TrainResult:
        """Do the steps that are left and save the student."""
        output = self.config.output
        file = MetricsFile(output / "metrics.jsonl", self.step)
        self.student.model.train()
        begin, tokens_before = time.perf_counter(), self.tokens
        for batch in self.stream:
            if self.step >= self.steps:
                break
            started = time.perf_counter()
            metrics = self._train_step(batch, started)
            file.write(metrics)
            if on_step is not None:
                on_step(metrics, self.steps)
            if self.step % self.config.checkpoint_every == 0 and self.step < self.steps:
                self._save_checkpoint()
        elapsed = time.perf_counter() - begin
        file.close()
        self.student.save(output / "student")
        plot_loss(output / "loss.png", {"student": read_metrics(file.path)}, "training loss")
        speed = (self.tokens - tokens_before) / max(elapsed, 1e-9)
        return TrainResult(output / "student", file.path, output / "loss.png", self.step, self.tokens, speed)

    def _train_step(self, batch: TopkBatch, started: float) -> StepMetrics:
        counted = int(batch.counted_BP.sum())
        if counted == 0 and self.step == 0:
            raise NothingToTrainOn("no row of the first batch counts: every target is masked or absent")
        self.optimizer.param_groups[0]["lr"] = learning_rate(self.config, self.step, self.steps)
        loss, shares = 0.0, []
        for part in micro_batches(batch, self.config.micro):
            part_loss, stats = self._backward(part, counted)
            loss += part_loss
            shares.append((int(part.counted_BP.sum()), stats))
        norm = float(nn.utils.clip_grad_norm_(self.student.model.parameters(), self.config.grad_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"step {self.step + 1}: loss {loss}, gradient norm {norm}; lower the learning rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = int(batch.attention_mask_BT.sum())
        kl, tail_kl = _mean(shares, "kl"), _mean(shares, "tail_kl")
        self.step += 1
        self.tokens += tokens
        return StepMetrics(
            step=self.step,
            loss=loss,
            support_mass=_mean(shares, "support_mass"),
            tail_share=tail_kl / kl if kl and tail_kl is not None else None,
            top1_agreement=_mean(shares, "top1_agreement"),
            grad_norm=norm,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            tokens=tokens,
            tokens_per_s=tokens / (time.perf_counter() - started),
        )

    def _backward(self, part: TopkBatch, num_items: int) -> tuple[float, KLStats]:
        """Add the gradient of a micro-batch; its loss is a share of the whole batch's mean."""
        tensors = to_tensors(part, self.device)
        labels_only = self.config.ce_weight == 1.0
        with self._autocast():
            hidden_BTH = self.student.hidden_BTH(tensors.input_ids_BT)
        hidden_RH: Tensor = hidden_BTH[:, :-1][tensors.counted_BP]
        loss, stats = topk_kl(
            hidden_RH,
            self.student.head,
            None if labels_only else tensors.rows,
            divergence=self.config.divergence,
            tail=self.config.tail,
            beta=self.config.beta,
            temperature=self.config.temperature,
            t2_scaling=self.config.t2_scaling,
            logit_scale=self.student.logit_scale,
            softcap=self.student.softcap,
            labels=tensors.labels_R if self.config.ce_weight or self.config.tail == "to_label" else None,
            ce_weight=self.config.ce_weight,
            num_items=max(num_items, 1),
            return_stats=True,
        )
        loss.backward()
        return float(loss.detach()), stats

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.split(":")[0], getattr(torch, self.config.dtype))

    def _save_checkpoint(self) -> None:
        tensors = {
            "model": self.student.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        state = {"identity": self.identity, "stream": self.stream.state_dict(), "tokens": self.tokens}
        save_checkpoint(self.config.output / "checkpoints", self.step, tensors, state)

    def _resume(self) -> None:
        found = load_checkpoint(self.config.output / "checkpoints", self.identity, self.device)
        if found is None:
            return
        tensors, state = found
        self.student.model.load_state_dict(tensors["model"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        torch.set_rng_state(tensors["random"].cpu())
        self.stream.load_state_dict(state["stream"])
        self.step, self.tokens = state["step"], state["tokens"]


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the rate of `step`: a linear warm-up, then half a cosine to 0."""
    warmup = max(round(config.warmup_fraction * steps), 1)
    decay = 0.5 + 0.5 * math.cos(math.pi * step / max(steps, 1))
    return config.learning_rate * min(1.0, (step + 1) / warmup) * decay


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _mean(shares: list[tuple[int, KLStats]], figure: str) -> float | None:
    known = [(count, float(getattr(stats, figure))) for count, stats in shares if count]
    known = [(count, value) for count, value in known if not math.isnan(value)]
    total = sum(count for count, _ in known)
    return sum(count * value for count, value in known) / total if total else None
