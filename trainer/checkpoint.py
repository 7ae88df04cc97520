"""Checkpoints: written whole or not at all, read without pickle."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError

KEPT = 2


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> Path:
    """Write checkpoint `step` under `folder` and drop all but the newest two.

    `tensors` are state dicts; `state` is JSON: the run's identity and where its stream stands.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial, target = folder / f".step-{step}.partial", folder / f"step-{step:08d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    torch.save(tensors, partial / "tensors.pt")
    (partial / "state.json").write_text(json.dumps({"step": step} | state))
    for path in (partial / "tensors.pt", partial / "state.json", partial):
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync(folder)
    for old in _checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)
    return target


def load_checkpoint(
    folder: Path, identity: dict[str, Any], device: str
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return (tensors, state) of the newest checkpoint under `folder`, or None.

    Raises:
        CheckpointError: it belongs to a run with other settings.
    """
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return None
    state = json.loads((checkpoints[-1] / "state.json").read_text())
    ours = json.loads(json.dumps(identity))
    if different := sorted(name for name in ours if state["identity"].get(name) != ours[name]):
        raise CheckpointError(
            f"{checkpoints[-1]} was made with other settings ({', '.join(different)}); "
            "choose another output folder or start afresh"
        )
    tensors = torch.load(checkpoints[-1] / "tensors.pt", map_location=device, weights_only=True)
    return tensors, state


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
