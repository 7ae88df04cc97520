"""The student: train it from a cache, with a loss that never builds [positions, vocabulary]."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import TrainConfig
    from .kl import TeacherRows, topk_kl
    from .loop import TrainResult, train
    from .student import Student, prune

__all__ = ["Student", "TeacherRows", "TrainConfig", "TrainResult", "prune", "topk_kl", "train"]

_HOMES = {
    "Student": "student",
    "TeacherRows": "kl",
    "TrainConfig": "config",
    "TrainResult": "loop",
    "prune": "student",
    "topk_kl": "kl",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    # on first use: the command line lists its commands without loading torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
