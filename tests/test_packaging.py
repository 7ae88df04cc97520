"""What the distribution holds, and that it runs where only the distribution is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BESIDE_THE_PACKAGE = {"benchmarks", "build", "dist", "docs", "scripts", "tests"}


def visible(path: Path) -> bool:
    """Whether a path below the root is part of the source, not something that a tool left."""
    parts = path.relative_to(ROOT).parts
    return not any(part.startswith(".") or part == "__pycache__" or part.endswith(".egg-info") for part in parts)


def package_files() -> set[str]:
    """The files that the package consists of, as paths below the root."""
    below = [
        path
        for folder in ROOT.iterdir()
        if folder.is_dir() and visible(folder) and folder.name not in BESIDE_THE_PACKAGE
        for path in folder.rglob("*")
        if path.is_file() and visible(path)
    ]
    return {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.py"), ROOT / "py.typed", *below]}


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command that must succeed and returns what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it alone."""
    work = tmp_path_factory.mktemp("packaging")
    # The name of a clone's folder must not matter, and this one cannot be imported.
    tree = work / "1 clone-of.it"
    left_out = shutil.ignore_patterns(".venv", ".git", ".*_cache", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", tree, cwd=work)
    return work / "dist"


@pytest.fixture(scope="module")
def wheel_files(distributions: Path) -> set[str]:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the installed wheel, which borrows this environment's dependencies."""
    home = tmp_path_factory.mktemp("elsewhere") / "env"
    venv.create(home, with_pip=False)
    scripts, wheel = home / "bin", next(distributions.glob("*.whl"))
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        scripts / "python",
        "install",
        "--no-index",
        "--no-deps",
        wheel,
        cwd=home,
    )
    # A line in a .pth file adds a folder without running that folder's own .pth files: the editable install stays out.
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


def test_every_folder_with_code_is_a_listed_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    parents = {Path(name).parent for name in package_files() if name.endswith(".py")}
    assert sorted(listed) == sorted(".".join(["teachercache", *parent.parts]) for parent in parents)


def test_wheel_holds_the_package_and_nothing_else(wheel_files: set[str]) -> None:
    content = {name for name in wheel_files if ".dist-info/" not in name}
    assert content == {f"teachercache/{name}" for name in package_files()}


def test_wheel_holds_what_readers_and_checkers_need(wheel_files: set[str]) -> None:
    assert {"teachercache/py.typed", "teachercache/format_spec/SPEC.md"} <= wheel_files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_files)


def test_source_distribution_builds_tests_and_explains_itself(distributions: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    beside = {"LICENSE", "Makefile", "README.md", "constraints.txt", "scripts/setup.sh", "tests/test_packaging.py"}
    assert package_files() | beside <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build/", "dist/"))]


def test_console_script_and_module_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import teachercache; print(teachercache.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    version = run(
        installed / "python", "-c", "import teachercache; print(teachercache.__version__)", cwd=tmp_path
    ).strip()
    assert version in run(installed / "teachercache", "--version", cwd=tmp_path)
    assert version in run(installed / "python", "-m", "teachercache", "--version", cwd=tmp_path)
