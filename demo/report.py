"""What the demo found: a short table, the same as JSON, and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .evaluate import Score

if TYPE_CHECKING:
    from ..trainer import TrainResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The demo's figures; KL in nats a token, memory in MB, time in seconds.

    `teacher_tokens_scored` counts what the teacher ran in this very demo: 0 when the cache was there. `capture_tok_s`
    is that of the run that made the cache, from the request to the last shard, the teacher's loading included.
    """

    heldout_kl_before: float
    heldout_kl_after: float
    heldout_kl_labels_only: float
    ppl_before: float
    ppl_after: float
    ppl_labels_only: float
    bytes_per_token: float
    cache_tokens: int
    shards: int
    k: int
    tail_samples: int
    mean_support_mass: float
    capture_tok_s: float
    train_tok_s: float
    teacher_tokens_scored: int
    loss_peak_mb: float
    dense_loss_peak_mb: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures, rounded to what they are worth."""
        return {
            name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in asdict(self).items()
        }

    def table(self) -> Any:
        """Return the figures as a table for a terminal."""
        from rich.table import Table

        table = Table(title="A student of every other layer, on text it has not seen", title_justify="left")
        for heading in ("student", "KL to the live teacher, nats", "perplexity"):
            table.add_column(heading, justify="left" if heading == "student" else "right")
        for name, score in self.scores().items():
            table.add_row(name, f"{score.kl:.3f}", f"{score.perplexity:.1f}")
        return table

    def lines(self) -> list[str]:
        """Return the other figures in words."""
        if self.teacher_tokens_scored:
            teacher = f"the teacher scored {self.teacher_tokens_scored:,} tokens at {self.capture_tok_s:,.0f} tokens/s"
        else:
            teacher = "the cache was there already: the teacher scored nothing"
        return [
            f"capture   {teacher}",
            f"cache     {self.cache_tokens:,} tokens in {self.shards} shards, {self.bytes_per_token:.1f} bytes a token "
            f"(top {self.k} with {self.mean_support_mass:.0%} of the mass, and {self.tail_samples} tail samples)",
            f"training  {self.train_tok_s:,.0f} tokens/s, the teacher's process gone",
            f"the loss  {self.loss_peak_mb:,.0f} MB at its peak, {self.dense_loss_peak_mb:,.0f} MB the dense way",
            f"all of it {self.seconds:,.0f} s",
        ]

    def scores(self) -> dict[str, Score]:
        """Return the score of each student by what it learned from."""
        return {
            "before training": Score(self.heldout_kl_before, self.ppl_before),
            "from labels only": Score(self.heldout_kl_labels_only, self.ppl_labels_only),
            "from the cache": Score(self.heldout_kl_after, self.ppl_after),
        }


def draw(report: Report, runs: dict[str, TrainResult], path: Path) -> None:
    """Draw where the students ended and how the distilled one learned."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    from ..trainer.metrics import read_metrics, running_mean

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=120, layout="constrained")
    scores = report.scores()
    bars = left.barh(list(scores), [score.kl for score in scores.values()], color=["0.7", "tab:orange", "tab:blue"])
    left.bar_label(bars, [f"{score.kl:.2f}" for score in scores.values()], padding=3)
    left.invert_yaxis()
    left.set(xlabel="KL to the live teacher, nats a token", title="held-out text, full vocabulary")
    left.spines[["top", "right"]].set_visible(False)
    left.margins(x=0.15)
    for (name, run), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=True):
        metrics = read_metrics(run.metrics)
        losses = [point.loss for point in metrics]
        right.plot([point.step for point in metrics], running_mean(losses), color=color, label=name)
    right.set(xlabel="step", ylabel="training loss, nats a token", title="training (each with its own loss)")
    right.spines[["top", "right"]].set_visible(False)
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(path)
    plt.close(figure)
