"""Prompts become sequences: the teacher continues them, and what it said is what a student is to learn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from ..format_spec import CacheRequest, Example
from .engines import Engine
from .plan import token_ids


def complete(
    engine: Engine, prompts: list[Example], first: int, spec: CacheRequest, progress: Callable[[], None]
) -> list[Example]:
    """Return the prompts, which are numbers `first` and on of their data set, with a completion each.

    The loss mask is true for the completion, and false for the prompt unless it has a mask of its own.
    """
    assert spec.generate is not None
    ids = [token_ids(prompt) for prompt in prompts]
    seeds = [completion_seed(spec.seed, first + index) for index in range(len(prompts))]
    found: list[Example | None] = [None] * len(prompts)
    for index, completion in engine.generate(ids, spec.generate, seeds):
        mask = prompts[index].loss_mask
        given = np.zeros(len(ids[index]), np.bool_) if mask is None else mask
        found[index] = Example(
            input_ids=np.concatenate([ids[index], completion]),
            loss_mask=np.concatenate([given, np.ones(len(completion), np.bool_)]),
        )
        progress()
    done = [example for example in found if example is not None]
    assert len(done) == len(prompts), "the engine left out a prompt"
    return done


def completion_seed(seed: int, number: int) -> int:
    """Return the seed of a completion, below 2^63: of the request's seed and the prompt's number in the data set.

    A prompt that stands there twice so has two completions.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8]) >> 1
