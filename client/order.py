"""Which sequences make up which batch: a pure function, the same for every world size.

n sequences, B batch size, W world size. A step takes the next B * W sequences of the epoch's order; rank r
gets every W-th of them from the r-th on. The last step of an epoch takes what is left, so ranks may get
fewer than B (or no) sequences there, but all ranks make the same number of steps and no sequence is lost.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import ConfigError

MAX_SEED = 2**64 - 1


def epoch_order(seed: int, epoch: int, num_sequences: int) -> npt.NDArray[np.int64]:
    """Return the shuffled sequence numbers of an epoch.

    Sorts by Philox's raw numbers, whose stream numpy promises to keep; that of `permutation` it does not.
    """
    key = hashlib.sha256(b"order" + struct.pack("<QQ", seed, epoch)).digest()[:16]
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_sequences)
    return np.argsort(raw, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of one rank: `numbers` are its sequences, `taken` those of all ranks.

    `cursor` counts the sequences that all ranks have consumed after it, over all epochs.
    """

    epoch: int
    cursor: int
    numbers: npt.NDArray[np.int64]
    taken: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cache of `num_sequences` is cut into steps; `epochs` None goes on for ever.

    Raises:
        ConfigError: an argument that cannot work.
    """

    num_sequences: int
    batch_size: int
    seed: int = 0
    epochs: int | None = 1
    shuffle: bool = True
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_sequences", 1, None),
            ("batch_size", 1, None),
            ("seed", 0, MAX_SEED),
            ("epochs", 0, None),
            ("world_size", 1, None),
            ("rank", 0, self.world_size - 1),
        ):
            value = getattr(self, name)
            if value is not None and (value < low or (high is not None and value > high)):
                limit = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ConfigError(f"{name} must be {limit}, not {value}")

    @property
    def global_batch(self) -> int:
        """Sequences that a full step takes over all ranks."""
        return self.batch_size * self.world_size

    def check_cursor(self, cursor: int) -> int:
        """Return `cursor`, refusing one outside this plan's epochs."""
        end = None if self.epochs is None else self.epochs * self.num_sequences
        if cursor < 0 or (end is not None and cursor > end):
            raise ConfigError(
                f"cursor {cursor} is not in 0 to {end}: {self.epochs} epochs of {self.num_sequences} sequences"
            )
        return cursor

    def num_steps(self, cursor: int) -> int | None:
        """Return the steps that are left from `cursor` on, None for ever."""
        if self.epochs is None:
            return None
        epoch, offset = divmod(cursor, self.num_sequences)
        if epoch >= self.epochs:
            return 0
        rest = -((offset - self.num_sequences) // self.global_batch)
        return rest + (self.epochs - epoch - 1) * -(-self.num_sequences // self.global_batch)

    def steps(self, cursor: int) -> Iterator[Step]:
        """Yield the steps from `cursor` on."""
        epoch, offset = divmod(cursor, self.num_sequences)
        while self.epochs is None or epoch < self.epochs:
            order = epoch_order(self.seed, epoch, self.num_sequences) if self.shuffle else None
            while offset < self.num_sequences:
                end = min(offset + self.global_batch, self.num_sequences)
                taken = np.arange(offset, end) if order is None else order[offset:end]
                offset = end
                cursor = epoch * self.num_sequences + offset
                yield Step(epoch, cursor, taken[self.rank :: self.world_size], taken)
            epoch, offset = epoch + 1, 0
