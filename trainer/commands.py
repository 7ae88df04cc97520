"""`teachercache train`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..format_spec.progress import progress
from .config import DIVERGENCES, DTYPES, TAILS, TrainConfig

if TYPE_CHECKING:
    from .loop import OnStep
    from .metrics import StepMetrics


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train`."""
    parser = subparsers.add_parser("train", help="train a student from a cache, without the teacher")
    parser.add_argument("--cache", required=True, help="request id, manifest digest, or a folder made by `pull`")
    parser.add_argument("--url", help="the cache server; not needed for a folder (default: $TEACHERCACHE_URL)")
    parser.add_argument("--student", required=True, help="folder or hub name of a Hugging Face causal LM")
    parser.add_argument("--output", required=True, type=Path, help="folder for the student, metrics and checkpoints")
    parser.add_argument("--keep-layers", type=_layers, metavar="0,2,4", help="prune the student to these layers first")
    parser.add_argument("--tail", choices=TAILS, default="auto", help="objective (default: what the rows allow)")
    parser.add_argument("--divergence", choices=DIVERGENCES, default="forward", help="of teacher and student")
    parser.add_argument("--t2-scaling", action="store_true", help="multiply loss and gradient by temperature squared")
    for name, kind, text in (
        ("beta", float, "the teacher's share of the mixture in jsd"),
        ("temperature", float, "of both, with renorm and renorm_both"),
        ("ce-weight", float, "share of the labels' cross-entropy, 0 to 1"),
        ("batch-size", int, "sequences a step"),
        ("micro-batch-size", int, "sequences a forward pass"),
        ("epochs", int, "passes over the cache"),
        ("max-steps", int, "stop after this many steps"),
        ("learning-rate", float, "peak rate"),
        ("weight-decay", float, "AdamW's"),
        ("grad-clip", float, "largest gradient norm"),
        ("seed", int, "order of the sequences"),
        ("checkpoint-every", int, "steps between checkpoints"),
    ):
        field = name.replace("-", "_")
        default = TrainConfig.__dataclass_fields__[field].default
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="bfloat16 computes under autocast")
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: a GPU where there is one)")
    parser.add_argument("--skip-tokenizer-check", action="store_true", help="trust that the token ids mean the same")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(handler=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Train, with a progress bar, and say where the student is."""
    names = [name for name in TrainConfig.__dataclass_fields__ if name in vars(args)]
    config = TrainConfig(**{name: getattr(args, name) for name in names}, check_tokenizer=not args.skip_tokenizer_check)
    from .loop import train

    with step_progress("training") as on_step:
        result = train(config, on_step)
    summary = {
        "student": str(result.student),
        "metrics": str(result.metrics),
        "plot": str(result.plot),
        "steps": result.steps,
        "tokens": result.tokens,
        "train_tok_s": round(result.tokens_per_s, 1),
    }
    if args.json:
        print(json.dumps(summary))
    else:
        print(f"{result.steps} steps at {result.tokens_per_s:,.0f} tokens/s")
        print(f"student   {result.student}")
        print(f"loss      {result.plot}")
    return 0


@contextmanager
def step_progress(title: str) -> Iterator[OnStep]:
    """Show the steps of a run on standard error."""
    with progress(title) as report:

        def on_step(metrics: StepMetrics, steps: int) -> None:
            report(metrics.step, steps, f"loss {metrics.loss:.4f}, {metrics.tokens_per_s:,.0f} tokens/s")

        yield on_step


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layer numbers such as 0,2,4") from error
