"""Teacher engines: one file each behind the protocol `Engine`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...format_spec import Fingerprint, Generation, Rows
from ..errors import MissingExtra
from .errors import EngineDied, EngineError, InvalidSetting, UnknownEngine, UnscorableSequence, UntokenizableExample

# an engine's name, which is that of the extra that installs what it runs on: its module here, and its class
ENGINES = {
    "transformers": (".transformers", "TransformersEngine"),
    "vllm": (".vllm.engine", "VllmEngine"),
    "openai": (".openai", "OpenAIEngine"),
}


class Engine(Protocol):
    """A loaded teacher that turns token sequences into rows."""

    @property
    def name(self) -> str:
        """The engine's name, as requests spell it."""

    @property
    def vocab_size(self) -> int:
        """Entries of a full distribution."""

    @property
    def max_length(self) -> int:
        """Longest sequence that can be scored, in tokens."""

    @property
    def draws_tail_samples(self) -> bool:
        """Whether rows can have tail samples."""

    def fingerprint(self, teacher: str, tokenizer: str) -> Fingerprint:
        """Return who produces the numbers, given the digests of the teacher and of its tokenizer."""

    def score(
        self,
        sequences: Sequence[npt.NDArray[np.integer[Any]]],
        *,
        k: int,
        tail_samples: int,
        seed: int,
        min_prob: float = 0.0,
    ) -> Iterator[tuple[int, Rows]]:
        """Yield each sequence's number in `sequences` and its rows, one fewer than its tokens, as they are done.

        A row keeps its k most probable entries without those below `min_prob`, but the first in any case; all
        others are its tail. The same list gives the same order and, on the same machine, the same bits. Arguments
        are checked before the first row is computed.

        Raises:
            UnscorableSequence: fewer than 2 tokens, more than `max_length`, or an id outside the vocabulary.
            InvalidSetting: `k` is outside 1 .. `vocab_size`, `tail_samples` cannot be drawn, or `min_prob` is no
                probability.
            EngineDied: processes of the engine's own ended or hang; it is of no more use.
        """

    def generate(
        self, prompts: Sequence[npt.NDArray[np.integer[Any]]], settings: Generation, seeds: Sequence[int]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield each prompt's number in `prompts` and the token ids of its completion, at least one, as they are done.

        A completion ends with an end-of-sequence token of the teacher, or where `settings` or `max_length` end it.
        What is drawn for a prompt depends on its seed, but for rounding.

        Raises:
            InvalidSetting: the engine scores what it is given, and does not generate.
            EngineDied: processes of the engine's own ended or hang.
        """

    def close(self) -> None:
        """Give back memory and processes; the engine is of no more use."""


__all__ = [
    "Engine",
    "EngineDied",
    "EngineError",
    "InvalidSetting",
    "UnknownEngine",
    "UnscorableSequence",
    "UntokenizableExample",
    "load_engine",
]


def load_engine(name: str, path: str | Path, **options: Any) -> Engine:
    """Load the teacher at `path` into the engine called `name`; `options` are those of the engine's class.

    Raises:
        UnknownEngine: there is no such engine.
        MissingExtra: the libraries it runs on are missing.
        UnsupportedTeacher: the engine cannot run this teacher.
    """
    if name not in ENGINES:
        raise UnknownEngine(f"unknown engine {name!r}; known: {sorted(ENGINES)}")
    try:
        module, class_name = ENGINES[name]
        engine_class = getattr(importlib.import_module(module, __name__), class_name)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"engine {name!r} needs {error.name}, which is not installed: pip install 'teachercache[{name}]'"
        ) from error
    engine: Engine = engine_class(path, **options)
    return engine
