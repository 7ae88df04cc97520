"""scripts/setup.sh: what it refuses, what it repeats, and what it finishes after it was cut off."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("pyproject.toml", "constraints.txt", "scripts/setup.sh", "scripts/torch_build.py")

# An interpreter whose pip installs nothing: it notes what it was asked, answers a dry run with the report in
# $REPORT, and fails while the file $BROKEN is there. All the rest is done by the real interpreter.
INTERPRETER = """#!/bin/sh
case "$*" in
*"print(platform.python_version())"*)
    if [ -n "${FAKE_VERSION:-}" ]; then echo "$FAKE_VERSION"; exit; fi ;;
"-m venv "*)
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    echo "VIRTUAL_ENV=$(pwd -P)/.venv" >.venv/bin/activate
    exit ;;
*'m.version("torch")'*)
    exit 1 ;;
"-m pip install "*)
    echo "$*" >>"$CALLS"
    case "$*" in *--dry-run*) cp "$REPORT" .venv/torch.json ;; esac
    if [ -e "$BROKEN" ]; then echo "the network went away" >&2; exit 1; fi
    exit ;;
esac
exec "$REAL" "$@"
"""

CPU = {"name": "torch", "version": "2.13.0+cpu", "requires_dist": ["sympy"]}
PLAIN = {"name": "torch", "version": "2.13.0", "requires_dist": ['nvidia-nccl-cu13; sys_platform == "never"', "sympy"]}
OPTIONAL = {"name": "torch", "version": "2.13.0", "requires_dist": ['nvidia-nccl-cu13; extra == "gpu"']}
CUDA = {"name": "torch", "version": "2.13.0", "requires_dist": ["sympy", "nvidia-cudnn-cu13==9.20.0.48"]}
CUDA_LOCAL = {"name": "torch", "version": "2.13.0+cu130"}


class Tree:
    """A copy of the set-up's inputs, with an interpreter whose pip installs nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in INPUTS:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        self.python = root / "interpreter"
        self.python.write_text(INTERPRETER)
        self.python.chmod(0o755)
        self.calls, self.broken, self.report = root / "calls", root / "broken", root / "report.json"
        self.use_torch(CPU)

    def use_torch(self, metadata: Mapping[str, object]) -> None:
        self.report.write_text(json.dumps({"install": [{"metadata": metadata}]}))

    def setup(self, **settings: str) -> subprocess.CompletedProcess[str]:
        """Runs the set-up on a machine with room enough, unless the settings say otherwise."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SETUP_", "TORCH_", "PYTHON"))
        }
        fakes = {
            "REAL": sys.executable,
            "CALLS": str(self.calls),
            "BROKEN": str(self.broken),
            "REPORT": str(self.report),
        }
        machine = {"PYTHON": str(self.python), "SETUP_MEMORY_MB": "16000", "SETUP_FREE_MB": "50000"}
        command = ["sh", "scripts/setup.sh"]
        env = kept | fakes | machine | settings
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=60)

    def installs(self) -> list[str]:
        """What pip was asked to do since the last look."""
        asked = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return asked


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    # A space in the path is the likeliest thing to break a shell script.
    (tmp_path / "a tree").mkdir()
    return Tree(tmp_path / "a tree")


@pytest.mark.parametrize("version", ["2.7.18", "3.9.18", "3.10.0rc1", "3.10.13"])
def test_old_python_is_refused_by_name(tree: Tree, version: str) -> None:
    done = tree.setup(FAKE_VERSION=version)
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr
    assert f"is Python {version}" in done.stderr
    assert not (tree.root / ".venv").exists()


def test_missing_python_is_refused(tree: Tree) -> None:
    done = tree.setup(PYTHON=str(tree.root / "absent"))
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr


@pytest.mark.parametrize(
    ("setting", "what"),
    [({"SETUP_MEMORY_MB": "2000"}, "memory: 2000 MB"), ({"SETUP_FREE_MB": "900"}, "free disk: 900 MB")],
)
def test_small_machine_is_refused_unless_told_to_go_on(tree: Tree, setting: dict[str, str], what: str) -> None:
    refused = tree.setup(**setting)
    assert refused.returncode != 0
    assert what in refused.stderr
    assert tree.installs() == []
    insisted = tree.setup(SETUP_ANYWAY="1", **setting)
    assert insisted.returncode == 0, insisted.stderr
    assert f"warning: {what}" in insisted.stdout


def test_second_run_does_nothing(tree: Tree) -> None:
    first = tree.setup()
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("ready\n")
    assert "-e .[dev]" in tree.installs()[-1]
    assert (tree.root / ".venv/house/teachercache").resolve() == tree.root.resolve()
    # No room is asked for, no pip is started, and the interpreter need not be named again.
    second = tree.setup(SETUP_FREE_MB="0", PYTHON="")
    assert second.returncode == 0, second.stderr
    assert "everything is in place" in second.stdout
    assert tree.installs() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "scripts/setup.sh"])
def test_changed_input_is_noticed(tree: Tree, name: str) -> None:
    tree.setup()
    tree.installs()
    with (tree.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert "completing the .venv" in tree.setup().stdout
    assert "-e .[dev]" in tree.installs()[-1]


def test_failed_run_says_why_and_is_finished_by_the_next(tree: Tree) -> None:
    tree.broken.touch()
    failed = tree.setup()
    assert failed.returncode != 0
    assert "the network went away" in failed.stderr
    assert not (tree.root / ".venv/setup-stamp").exists()
    tree.broken.unlink()
    done = tree.setup()
    assert done.returncode == 0, done.stderr
    assert "completing the .venv" in done.stdout


def test_half_installed_package_is_taken_again(tree: Tree) -> None:
    tree.setup()
    (tree.root / ".venv/setup-stamp").unlink()
    site = tree.root / ".venv/lib/python3.11/site-packages"
    whole, half = site / "whole-1.dist-info", site / "half-1.dist-info"
    for package in (whole, half):
        package.mkdir(parents=True)
    (whole / "INSTALLER").write_text("pip\n")
    tree.setup()
    assert whole.exists()
    assert not half.exists()


def test_moved_tree_gets_a_new_environment(tree: Tree) -> None:
    tree.setup()
    tree.root = tree.root.rename(tree.root.with_name("moved"))
    tree.python = tree.root / "interpreter"
    tree.report = tree.root / "report.json"
    assert "making .venv" in tree.setup().stdout


@pytest.mark.parametrize("torch", [CPU, PLAIN, OPTIONAL])
def test_cpu_build_of_torch_is_taken(tree: Tree, torch: Mapping[str, object]) -> None:
    tree.use_torch(torch)
    done = tree.setup(SETUP_FREE_MB="7000")
    assert done.returncode == 0, done.stderr
    assert "it is a CPU build" in done.stdout


@pytest.mark.parametrize("torch", [CUDA, CUDA_LOCAL])
def test_cuda_build_of_torch_is_named_and_needs_room(tree: Tree, torch: Mapping[str, object]) -> None:
    tree.use_torch(torch)
    refused = tree.setup(SETUP_FREE_MB="7000")
    assert refused.returncode != 0
    assert "CUDA build" in refused.stdout
    assert "TORCH_INDEX" in refused.stderr
    assert not any("-e .[dev]" in call for call in tree.installs())
    assert tree.setup(SETUP_FREE_MB="20000").returncode == 0


def test_torch_index_is_used_for_torch_alone(tree: Tree) -> None:
    done = tree.setup(TORCH_INDEX="file:///wheels")
    assert done.returncode == 0, done.stderr
    pointed = [call for call in tree.installs() if "file:///wheels" in call]
    assert len(pointed) == 1
    assert pointed[0].endswith("--no-deps --index-url file:///wheels torch")


def test_ci_calls_make_test_and_nothing_else(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "$PWD: make $*"\n')
    make.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", ROOT / ".ci/run"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ROOT}: make test\n", "")
