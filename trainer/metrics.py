"""What a run says of itself: a line of JSON a step, and a picture of the loss."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step; losses in nats a token, `support_mass` the teacher's probability on its support."""

    step: int
    loss: float
    support_mass: float | None
    tail_share: float | None
    top1_agreement: float | None
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_s: float


class MetricsFile:
    """`metrics.jsonl` of a run; opening it at a step drops what a crash left beyond that step."""

    def __init__(self, path: Path, step: int = 0) -> None:
        self.path = path
        kept = [] if step == 0 else [line for line in read_metrics(path) if line.step <= step]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        for metrics in kept:
            self.write(metrics)

    def write(self, metrics: StepMetrics) -> None:
        """Append a step."""
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """Return the steps in a metrics file; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [StepMetrics(**json.loads(line)) for line in lines]


def plot_loss(path: Path, curves: dict[str, list[StepMetrics]], title: str) -> None:
    """Draw the loss of one or more runs over their steps, each with a running mean."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120, layout="constrained")
    for name, metrics in curves.items():
        steps = [point.step for point in metrics]
        losses = [point.loss for point in metrics]
        (line,) = axes.plot(steps, running_mean(losses), label=name)
        axes.plot(steps, losses, color=line.get_color(), alpha=0.25, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def running_mean(values: list[float], weight: float = 0.9) -> list[float]:
    """Return the exponentially weighted mean of the values so far, at each of them."""
    means: list[float] = []
    total = norm = 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        means.append(total / norm)
    return means
