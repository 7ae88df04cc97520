"""The command line: the sub-commands of the packages, and how their errors end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .format_spec.codes import Code
from .format_spec.errors import TeachercacheError

PACKAGES = ("demo", "service", "client", "trainer", "format_spec")
EXTRAS = {
    "torch": "trainer",
    "transformers": "trainer",
    "matplotlib": "trainer",
    "fastapi": "service",
    "prometheus_client": "service",
    "uvicorn": "service",
    "pydantic": "service",
    "pydantic_settings": "service",
    "gguf": "demo",
    "tokenizers": "demo",
    "yaml": "distillkit",
    "vllm": "vllm",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors raised on purpose are one line on standard error."""
    args = parser().parse_args(argv)
    try:
        return int(args.handler(args))
    except TeachercacheError as error:
        return _fail(" ".join(str(error).split()), error.code)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        return _fail(f"{error.name} is not installed: pip install 'teachercache[{extra}]'", Code.MISSING_EXTRA)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # whoever read our output went away; nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="teachercache", description="Run the teacher once, distill for ever.")
    top.add_argument("--version", action="version", version=f"teachercache {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for package in PACKAGES:
        import_module(f".{package}.commands", __package__).register(subparsers)
    return top


def _fail(message: str, code: Code) -> int:
    print(f"teachercache: error: {message} [{code.wire}]", file=sys.stderr)
    return code.exit_code
