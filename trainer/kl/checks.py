"""Checks of the values that a loss is given, all of them answered by one transfer from the device.

Shapes: C positions of a part, K support entries, N tail samples, E = K + N entries, F rules, X parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .objective import Objective
from .packing import PackedPositions, Part
from .rows import TeacherRows

# The largest of a check's buffers holds a few int64 per entry of a row: some 20 MB at k = 100.
PART_SIZE = 8192
WEIGHT_RULE = "position_weight must be finite and positive, or 0 to mask"


def check_values(packed: PackedPositions, vocab_size: int, *, has_teacher: bool) -> None:
    """Refuse values that would give a wrong loss silently; positions that do not count are never looked at.

    Raises:
        ValueError: names the rule and the first position that breaks it.
    """
    broken_X = [_flags(part, vocab_size, has_teacher).any(dim=1) for part in packed.parts(PART_SIZE)]
    failed = torch.nonzero(torch.stack(broken_X)).tolist() if broken_X else []
    if failed:
        index, rule = failed[0]
        part = packed.part(list(packed.slices(PART_SIZE))[index])
        number = int(_flags(part, vocab_size, has_teacher)[rule].nonzero()[0, 0])
        raise ValueError(
            f"{list(_broken(part, vocab_size, has_teacher))[rule]}: "
            f"not so at position {packed.position(part.counted.start + number)}"
        )


def _flags(part: Part, vocab_size: int, has_teacher: bool) -> Tensor:
    """Which rule is broken where; [F, C]."""
    return torch.stack(list(_broken(part, vocab_size, has_teacher).values()))


def _broken(part: Part, vocab_size: int, has_teacher: bool) -> dict[str, Tensor]:
    """Each rule in words, and the positions that break it."""
    broken = {WEIGHT_RULE: ~_sound(part.weight_C)}
    if part.labels_C is not None:
        outside_C = (part.labels_C < 0) | (part.labels_C >= vocab_size)
        broken[f"a label must be in the student's vocabulary of {vocab_size}, or ignore_index"] = outside_C
    if has_teacher:
        broken |= _broken_rows(part.rows, vocab_size, part.objective)
    if has_teacher and part.objective.tail == "sampled":
        broken |= _broken_samples(part.rows)
    return broken


def _broken_rows(rows: TeacherRows, vocab_size: int, objective: Objective) -> dict[str, Tensor]:
    ids_CK, log_tail_C = rows.token_ids_PK, rows.log_tail_mass_P
    sampled = objective.tail == "sampled" and rows.tail_token_ids_PN is not None
    draws_CN = rows.tail_token_ids_PN if sampled else ids_CK[:, :0]
    assert draws_CN is not None
    ids_CE = torch.cat([ids_CK, draws_CN], dim=1)
    mass_C = rows.logprobs_PK.masked_fill(ids_CK < 0, -torch.inf).exp().sum(1) + log_tail_C.exp()
    covers_C = (ids_CK >= 0).sum(1) >= vocab_size
    reverse = {
        "under the reverse divergence every outcome of the teacher must have mass": _has_empty(
            rows, covers_C, bucket=objective.tail == "bucket"
        )
    }
    return (reverse if objective.divergence == "reverse" else {}) | {
        f"a teacher token id must be below the student's vocabulary of {vocab_size}": (ids_CE >= vocab_size).any(1),
        "a row that counts must have an entry or, for `sampled`, a tail sample (mask the rows that are absent)": (
            ids_CE < 0
        ).all(1),
        "a support id must not be repeated in its row's support or tail samples": _repeats_support(ids_CK, draws_CN),
        # Wide enough for the coarsest stored grid, narrow enough for numbers that are no distribution at all.
        "a row's support and tail must hold a mass between 0.5 and 2": ~((mass_C > 0.5) & (mass_C < 2.0)),
        "a support that covers the vocabulary must have an empty tail": covers_C & (log_tail_C > -torch.inf),
    }


def _has_empty(rows: TeacherRows, covers_C: Tensor, *, bucket: bool) -> Tensor:
    """Whether the teacher gives one of a row's outcomes no mass."""
    empty_C = ((rows.logprobs_PK == -torch.inf) & (rows.token_ids_PK >= 0)).any(1)
    if bucket:
        empty_C |= (rows.log_tail_mass_P == -torch.inf) & ~covers_C
        # All mass in the tail, as float32 has it, leaves none to the support.
        empty_C |= rows.log_tail_mass_P >= 0.0
    return empty_C


def check_weights(packed: PackedPositions) -> None:
    """Refuse position weights that are negative or not finite.

    Raises:
        ValueError: names the first position.
    """
    broken_R = ~_sound(packed.weight_R)
    if broken_R.any():
        raise ValueError(f"{WEIGHT_RULE}: not so at position {packed.position(int(broken_R.nonzero()[0, 0]))}")


def _sound(weight_C: Tensor) -> Tensor:
    return (weight_C > 0) & torch.isfinite(weight_C)


def _repeats_support(ids_CK: Tensor, draws_CN: Tensor) -> Tensor:
    """Whether a support id occurs again in its row: coded 2 id, or 2 id + 1 as a draw, it sorts next to its twin."""
    code_CE = torch.cat([ids_CK * 2, draws_CN * 2 + 1], dim=1).sort(dim=1).values
    first, second = code_CE[:, :-1], code_CE[:, 1:]
    return ((first >= 0) & (first % 2 == 0) & (second - first <= 1)).any(1)


def _broken_samples(rows: TeacherRows) -> dict[str, Tensor]:
    assert rows.tail_token_ids_PN is not None
    assert rows.entropy_P is not None
    undrawn_C = (rows.tail_token_ids_PN < 0).all(1) & (rows.log_tail_mass_P > -torch.inf)
    return {
        "a row whose tail is not empty must have tail samples": undrawn_C,
        "a row's entropy must be finite": ~torch.isfinite(rows.entropy_P),
    }
