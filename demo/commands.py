"""`teachercache demo`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo`."""
    parser = subparsers.add_parser("demo", help="run the whole path on a real small teacher, in a few minutes")
    parser.add_argument(
        "--folder", type=Path, help="where the demo keeps its cache and students (default: user's cache)"
    )
    parser.add_argument("--train-tokens", type=int, help="tokens that the teacher scores")
    parser.add_argument("--heldout-tokens", type=int, help="tokens to compare the students on")
    parser.add_argument("--epochs", type=int, help="passes of the students over the cache")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; what it says on the way goes to standard error, the figures to standard output."""
    from rich.console import Console

    from .run import DemoConfig, default_folder, run_demo

    given = {name: getattr(args, name) for name in ("train_tokens", "heldout_tokens", "epochs")}
    config = DemoConfig(
        folder=args.folder or default_folder(), **{name: value for name, value in given.items() if value is not None}
    )
    report = run_demo(config, lambda line: print(line, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps(report.to_json()))
        return 0
    console = Console()
    console.print(report.table())
    for line in [*report.lines(), f"picture   {config.folder / 'demo.png'}"]:
        console.print(line, highlight=False, soft_wrap=True)
    return 0
