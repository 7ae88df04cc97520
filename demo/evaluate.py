"""How far students are from the live teacher on held-out text, over the full vocabulary.

Shapes: B sequences, T tokens, R rows that count, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Score:
    """KL(teacher || student) in nats a token, and the student's perplexity."""

    kl: float
    perplexity: float


def evaluate(
    teacher: Path, students: Sequence[Path], heldout: Sequence[Sequence[int]], on_batch: Callable[[int, int], None]
) -> list[Score]:
    """Return the score of each student; `on_batch` is told how many sequences of how many are done."""
    import torch
    from transformers import AutoModelForCausalLM

    models: list[Any] = []
    for path in (teacher, *students):
        models.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    kl, nll, rows = [0.0] * len(students), [0.0] * len(students), 0
    ordered = sorted(heldout, key=len)
    done = 0
    while done < len(ordered):
        batch = _take(ordered, done)
        done += len(batch)
        longest = max(len(sequence) for sequence in batch)
        ids_BT = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in batch])
        lengths_B = torch.tensor([len(sequence) for sequence in batch])
        counted_BP = torch.arange(1, longest)[None] < lengths_B[:, None]
        labels_R = ids_BT[:, 1:][counted_BP]
        rows += len(labels_R)
        with torch.no_grad():
            # padding on the right is not seen by real positions under a causal mask
            logprobs = [model(ids_BT).logits[:, :-1][counted_BP].log_softmax(-1) for model in models]
            teacher_RV = logprobs[0]
            for i, student_RV in enumerate(logprobs[1:]):
                kl[i] += float((teacher_RV.exp() * (teacher_RV - student_RV)).sum(dtype=torch.float64))
                nll[i] -= float(student_RV.gather(1, labels_R[:, None]).sum(dtype=torch.float64))
        on_batch(done, len(ordered))
    return [Score(kl[i] / rows, math.exp(nll[i] / rows)) for i in range(len(students))]


def _take(sequences: Sequence[Sequence[int]], first: int) -> Sequence[Sequence[int]]:
    """Sequences from `first` on, as many as fit the batch when padded to the longest; they ascend by length."""
    last = first + 1
    while last < len(sequences) and (last + 1 - first) * len(sequences[last]) <= BATCH_TOKENS:
        last += 1
    return sequences[first:last]
