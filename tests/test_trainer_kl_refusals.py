"""What `TeacherRows` and `topk_kl` refuse, and that the message says what and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_trainer_kl_cases import make_case
from torch import Tensor

from teachercache.trainer import kl
from teachercache.trainer.kl import TeacherRows, checks, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = make_case(positions=6, vocab=20, k=3, samples=2)
ROWS = CASE.rows
LABELS = CASE.labels.clamp(min=0)
DRAWS = ROWS.tail_token_ids_PN
assert DRAWS is not None
assert ROWS.entropy_P is not None


def at(tensor: Tensor, index: Any, value: float) -> Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


def test_public_names() -> None:
    assert kl.__all__ == ["PAD_ID", "KLStats", "Tail", "TeacherRows", "topk_kl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids_PK": ROWS.token_ids_PK[0]}, r"token_ids_PK must be \[P, K >= 1\]"),
        ({"token_ids_PK": ROWS.token_ids_PK[:, :0]}, r"token_ids_PK must be \[P, K >= 1\]"),
        ({"token_ids_PK": ROWS.token_ids_PK.int()}, "token_ids_PK must be .*int64"),
        ({"logprobs_PK": ROWS.logprobs_PK.bfloat16()}, "logprobs_PK must be .*float32"),
        ({"logprobs_PK": ROWS.logprobs_PK[:, :2]}, r"logprobs_PK must be \[6, 3\]"),
        ({"log_tail_mass_P": ROWS.log_tail_mass_P[:5]}, r"log_tail_mass_P must be \[6\]"),
        ({"tail_token_ids_PN": DRAWS[:, :0]}, r"tail_token_ids_PN must be \[6, 1\]"),
        ({"tail_token_ids_PN": DRAWS[0, 0]}, r"tail_token_ids_PN must be \[6, 1\]"),
        ({"entropy_P": ROWS.entropy_P.double()}, "entropy_P must be .*float32"),
        ({"log_tail_mass_P": ROWS.log_tail_mass_P.to("meta")}, "log_tail_mass_P must be .* on cpu"),
        ({"logprobs_PK": ROWS.logprobs_PK.clone().requires_grad_()}, "logprobs_PK requires a gradient"),
    ],
)
def test_rows_of_another_shape_dtype_or_device(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ROWS, **change)


def test_rows_can_be_selected_and_moved() -> None:
    some = ROWS.select(torch.tensor([4, 1]))
    assert len(some) == 2
    assert torch.equal(some.token_ids_PK, ROWS.token_ids_PK[[4, 1]])
    assert some.entropy_P is not None
    plain = replace(ROWS, tail_token_ids_PN=None, entropy_P=None).select(slice(1, 3)).to("meta")
    assert plain.device.type == "meta"
    assert plain.logprobs_PK.shape == (2, 3)
    assert plain.tail_token_ids_PN is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids_PK": at(ROWS.token_ids_PK, (4, 0), 20)}, "vocabulary of 20: not so at position 4"),
        ({"tail_token_ids_PN": at(DRAWS, (2, 1), 99)}, "vocabulary of 20: not so at position 2"),
        ({"token_ids_PK": at(ROWS.token_ids_PK, 3, -1)}, "must have an entry .*: not so at position 3"),
        ({"tail_token_ids_PN": at(DRAWS, (5, 0), int(ROWS.token_ids_PK[5, 0]))}, "repeated .*: not so at position 5"),
        ({"logprobs_PK": at(ROWS.logprobs_PK, (1, 0), torch.nan)}, "between 0.5 and 2: not so at position 1"),
        (
            {"logprobs_PK": at(ROWS.logprobs_PK, 1, -9.0), "log_tail_mass_P": at(ROWS.log_tail_mass_P, 1, -9.0)},
            "between 0.5 and 2",
        ),
        ({"log_tail_mass_P": at(ROWS.log_tail_mass_P, 0, torch.nan)}, "between 0.5 and 2: not so at position 0"),
        ({"tail_token_ids_PN": at(DRAWS, 2, -1)}, "must have tail samples: not so at position 2"),
        ({"entropy_P": at(ROWS.entropy_P, 4, torch.nan)}, "entropy must be finite: not so at position 4"),
    ],
)
def test_rows_with_values_that_would_train_something_else(change: dict[str, Tensor], message: str) -> None:
    rows = replace(ROWS, **change)
    with pytest.raises(ValueError, match=message):
        topk_kl(CASE.hidden, CASE.weight, rows)
    broken = (rows.token_ids_PK != ROWS.token_ids_PK).any(1)
    for name in change:
        broken |= (getattr(rows, name) != getattr(ROWS, name)).reshape(6, -1).any(1)
    assert torch.isfinite(topk_kl(CASE.hidden, CASE.weight, rows, position_weight=~broken))


def test_duplicate_support_ids_are_refused() -> None:
    rows = make_case(positions=6, vocab=20, k=3, ragged=False).rows
    doubled = replace(rows, token_ids_PK=at(rows.token_ids_PK, (3, 2), int(rows.token_ids_PK[3, 0])))
    with pytest.raises(ValueError, match=r"must not be repeated .*: not so at position 3"):
        topk_kl(CASE.hidden, CASE.weight, doubled, tail="bucket")


def test_a_support_of_the_whole_vocabulary_cannot_leave_a_tail() -> None:
    case = make_case(positions=2, vocab=3, k=3, ragged=False)
    rows = replace(case.rows, log_tail_mass_P=torch.full((2,), -5.0))
    with pytest.raises(ValueError, match="covers the vocabulary"):
        topk_kl(case.hidden, case.weight, rows, tail="bucket")


def test_the_position_named_is_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PART_SIZE", 2)
    rows = replace(ROWS, token_ids_PK=at(ROWS.token_ids_PK, (5, 0), 20))
    with pytest.raises(ValueError, match="position 5"):
        topk_kl(CASE.hidden, CASE.weight, rows, position_weight=torch.tensor([0, 1, 0, 1, 1, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "renorm"}, "tail must be one of auto, sampled, bucket, truncated, got 'renorm'"),
        ({"reduction": "none"}, "reduction must be one of mean, sum"),
        ({"impl": "triton"}, "impl must be one of auto, torch, reference"),
        ({"ce_weight": 1.5, "labels": LABELS}, "ce_weight must be from 0 to 1, got 1.5"),
        ({"ce_weight": torch.nan, "labels": LABELS}, "ce_weight must be from 0 to 1"),
        ({"ce_weight": 0.3}, "ce_weight is 0.3, but there are no labels"),
        ({"chunk_bytes": 0}, "chunk_bytes must be positive"),
        ({"labels": LABELS[:5]}, r"labels must be \[6\], got \[5\]"),
        ({"labels": LABELS.int()}, "labels must be int64"),
        ({"labels": LABELS.to("meta")}, "labels is on meta"),
        ({"labels": at(LABELS, 3, 20)}, "a label must be in the student's vocabulary of 20, .* position 3"),
        ({"labels": at(LABELS, 3, -1)}, "a label must be in the student's vocabulary of 20, .* position 3"),
        ({"bias": torch.zeros(6)}, r"bias must be \[20\]"),
        ({"position_weight": torch.ones(6, requires_grad=True)}, "position_weight requires a gradient"),
        ({"position_weight": at(torch.ones(6), 2, -1.0)}, "position_weight must be finite and positive.* position 2"),
        ({"position_weight": at(torch.ones(6), 2, torch.nan)}, "position_weight must be finite.* position 2"),
        ({"num_items": 0}, "num_items must be positive, got 0"),
        ({"num_items": torch.tensor(-1)}, "num_items must be positive, got -1"),
        ({"num_items": 5, "reduction": "sum"}, "num_items divides a mean"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topk_kl(CASE.hidden, CASE.weight, ROWS, **options)


def test_tensors_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match=r"hidden must be \[P, H\] and weight \[V, H\]"):
        topk_kl(CASE.hidden[None], CASE.weight, ROWS)
    with pytest.raises(ValueError, match=r"hidden must be \[P, H\] and weight \[V, H\]"):
        topk_kl(CASE.hidden, CASE.weight[:, :3], ROWS)
    with pytest.raises(ValueError, match="6 hidden states, but 5 rows"):
        topk_kl(CASE.hidden, CASE.weight, ROWS.select(slice(0, 5)))


def test_a_teacher_is_needed_but_for_labels_alone() -> None:
    with pytest.raises(ValueError, match=r"ce_weight is 0\.5, but there are no rows"):
        topk_kl(CASE.hidden, CASE.weight, None, labels=LABELS, ce_weight=0.5)


def test_sampled_needs_samples_and_entropy() -> None:
    plain = TeacherRows(ROWS.token_ids_PK, ROWS.logprobs_PK, ROWS.log_tail_mass_P)
    with pytest.raises(ValueError, match="no tail samples"):
        topk_kl(CASE.hidden, CASE.weight, plain, tail="sampled")
    with pytest.raises(ValueError, match="no entropy"):
        topk_kl(CASE.hidden, CASE.weight, replace(ROWS, entropy_P=None))
