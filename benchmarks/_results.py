"""How a benchmark says what it found: one JSON object, kept with where and when it was measured."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results")
    return parser


def need_vllm() -> None:
    """End here where there is no vLLM: `make bench` runs every script, and most machines lack it."""
    if importlib.util.find_spec("vllm") is None:
        print("skipped: it needs vLLM; make test-vllm, then .venv-vllm/bin/python on this script", file=sys.stderr)
        raise SystemExit(0)


def hardware() -> str:
    """Return a short name of the machine: its GPU, or its processor's architecture and cores."""
    try:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
        return names.stdout.splitlines()[0].split()[-1].lower()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return f"cpu-{platform.machine()}-{os.cpu_count()}"


def finish(name: str, figures: dict[str, Any], packages: list[str], args: argparse.Namespace) -> None:
    """Print the figures and keep them where `--save` asks for it."""
    root = Path(__file__).parent.parent
    result = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(root),
        "hardware": {"name": hardware(), "cpu": _cpu(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in packages},
        "figures": figures,
    }
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.{hardware()}.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(figures))
    else:
        for key, value in figures.items():
            print(f"{key:40} {value}")


def _commit(root: Path) -> str | None:
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return head.stdout.strip() or None


def _version(package: str) -> str:
    # vLLM for a CPU goes by another name
    return metadata.version(metadata.packages_distributions()[package][0])


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
