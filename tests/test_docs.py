"""What the documents show works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from teachercache import cli

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str = "") -> list[str]:
    """The fenced blocks of the README in this language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks() for line in block.splitlines() if line.startswith("teachercache ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_readme_are_understood(line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    assert cli.parser().parse_args(arguments).handler


def test_readme_shows_the_main_commands() -> None:
    shown = {line.split()[1] for line in COMMANDS}
    assert shown >= {"serve", "submit", "train"}


def test_readme_tree_is_the_tree() -> None:
    root = Path(__file__).parent.parent
    tree = README.split("## What is where")[1].split("```")[1]
    folders = {name for line in tree.splitlines() for name in re.findall(r"(?:^|(?<=/  ))(\w+)/", line)}
    assert folders >= {"format_spec", "client", "service", "trainer", "demo", "tests"}
    assert all((root / name).is_dir() for name in folders)


def test_links_of_the_readme_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / target).exists(), target


def test_tests_that_a_document_names_are_there() -> None:
    root = Path(__file__).parent.parent
    defined = {
        name for path in root.glob("tests/test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    files = {path.name for path in root.glob("tests/test_*.py")}
    documents = [
        path
        for folder in ("", "docs/", "docs/decisions/", "trainer/kl/", "format_spec/", "service/")
        for path in root.glob(f"{folder}*.md")
    ]
    named = {name for path in documents for name in re.findall(r"`(test_\w+(?:\.py)?)`", path.read_text())}
    assert len(named) > 20
    assert named <= defined | files, named - defined - files


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"demo", "serve", "worker", "submit", "status", "wait", "ls", "pull", "train"} <= set(listed)
    for command in listed:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, "--help"])
        assert stopped.value.code == 0
        capsys.readouterr()
