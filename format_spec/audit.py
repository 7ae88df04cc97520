"""What an audit found: rows that were scored again, and how far what is stored is from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


class AuditTally:
    """Sums over rows; tallies of shards add to that of the cache.

    The KL is from the stored row to the one scored again, in nats. Of the tail samples, those among the tail's most
    probable ids are counted, beside how many independent draws would be there, and their variance.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.kl = 0.0
        self.max_kl = 0.0
        self.draws = 0
        self.expected_draws = 0.0
        self.draws_variance = 0.0

    @property
    def mean_kl(self) -> float:
        """Nats a row."""
        return self.kl / max(self.rows, 1)

    @property
    def draws_z(self) -> float:
        """Standard deviations of the draws from what is expected; 0 without draws."""
        if self.draws_variance == 0.0:
            return 0.0
        return (self.draws - self.expected_draws) / math.sqrt(self.draws_variance)

    def add_kl(self, kl_P: npt.NDArray[np.float64]) -> None:
        """Count rows."""
        self.rows += len(kl_P)
        self.kl += float(kl_P.sum())
        self.max_kl = max(self.max_kl, float(kl_P.max(initial=0.0)))

    def add_draws(self, seen: int, expected: float, variance: float) -> None:
        """Count draws of a row."""
        self.draws += seen
        self.expected_draws += expected
        self.draws_variance += variance

    def to_json(self) -> dict[str, Any]:
        """Return the sums, to be stored beside a shard."""
        return dict(self.__dict__)

    def merge(self, sums: dict[str, Any]) -> None:
        """Add the sums that another tally returned."""
        self.max_kl = max(self.max_kl, sums["max_kl"])
        for name in ("rows", "kl", "draws", "expected_draws", "draws_variance"):
            setattr(self, name, getattr(self, name) + sums[name])
