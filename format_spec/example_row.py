"""One row of a shard, for people to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .rows import PAD_ID, ScoredSequence

CONTEXT = 8


@dataclass(frozen=True, slots=True)
class ExampleRow:
    """The counted row nearest to the middle of a sequence: what came before, what came, what the teacher expected."""

    sequence: int
    position: int
    context: tuple[int, ...]
    next_token: int
    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
    tail_mass: float
    tail_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, number: int, sequence: ScoredSequence) -> ExampleRow | None:
        """Return the example of sequence `number`, None where no row counts."""
        counted = np.flatnonzero(sequence.counted_P)
        if not len(counted):
            return None
        i = int(counted[np.abs(counted - len(sequence) // 2).argmin()])
        rows = sequence.rows[i : i + 1]
        kept = rows.token_ids_PK[0] != PAD_ID
        drawn = [] if rows.tail_token_ids_PN is None else rows.tail_token_ids_PN[0].tolist()
        return cls(
            sequence=number,
            position=i,
            context=tuple(sequence.input_ids_L[max(i + 1 - CONTEXT, 0) : i + 1].tolist()),
            next_token=int(sequence.input_ids_L[i + 1]),
            token_ids=tuple(rows.token_ids_PK[0][kept].tolist()),
            probabilities=tuple(np.exp(rows.logprobs_PK[0][kept]).tolist()),
            tail_mass=float(np.exp(rows.log_tail_mass_P[0])),
            tail_token_ids=tuple(token for token in drawn if token != PAD_ID),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the row."""
        return asdict(self)

    def lines(self, text: Callable[[int], str]) -> list[str]:
        """Return the row for people; `text` shows a token."""
        lines = [f"row {self.position} of sequence {self.sequence}, after {' '.join(map(text, self.context))}"]
        for token, probability in zip(self.token_ids, self.probabilities, strict=True):
            came = "  <- came next" if token == self.next_token else ""
            lines.append(f"  {probability:8.6f}  {text(token)}{came}")
        drawn = f", drawn: {' '.join(map(text, self.tail_token_ids))}" if self.tail_token_ids else ""
        came = "" if self.next_token in self.token_ids else f"; {text(self.next_token)} came next"
        return [*lines, f"  {self.tail_mass:8.6f}  tail{drawn}{came}"]
