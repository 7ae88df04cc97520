"""What `TeacherRows` and `topk_kl` refuse, and that the message says what and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_trainer_kl_cases import arguments, make_case
from torch import Tensor

from teachercache.trainer import kl
from teachercache.trainer.kl import TeacherRows, checks, topk_kl, triton_chunks

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
    assert kl.__all__ == ["PAD_ID", "KLStats", "Tail", "TeacherRows", "TopKKLLoss", "topk_kl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids_PK": ROWS.token_ids_PK[0]}, r"token_ids_PK must be \[P, K >= 1\]"),
        ({"token_ids_PK": ROWS.token_ids_PK[:, :0]}, r"token_ids_PK must be \[P, K >= 1\]"),
        ({"token_ids_PK": ROWS.token_ids_PK.short()}, "token_ids_PK must be .*int64 or torch.int32"),
        ({"tail_token_ids_PN": DRAWS.int()}, "tail_token_ids_PN must be .*int64 on"),
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


@dataclass(frozen=True)
class Broken:
    """A row's value that would train something else, at one position of CASE, and what is said of it."""

    position: int
    change: dict[str, Tensor]
    message: str
    mode: str = "sampled"

    @property
    def rows(self) -> TeacherRows:
        return replace(ROWS, **self.change)

    def run(self, *, labels: Tensor = LABELS, **more: Any) -> Tensor:
        chosen = arguments(self.mode, labels, **more)
        return topk_kl(CASE.hidden.float(), CASE.weight.float(), self.rows, **chosen)


def row(name: str, position: int, value: float | list[float]) -> dict[str, Tensor]:
    """One field of ROWS with another value at one position."""
    tensor = getattr(ROWS, name).clone()
    tensor[position] = torch.as_tensor(value, dtype=tensor.dtype)
    return {name: tensor}


TWICE, IN_DRAWS = int(ROWS.token_ids_PK[3, 0]), int(ROWS.token_ids_PK[5, 0])
BROKEN = {
    "id": Broken(4, row("token_ids_PK", 4, [20, 1, 2]), "must be below the student's vocabulary of 20"),
    "huge id": Broken(4, row("token_ids_PK", 4, [2**32 + 5, 1, 2]), "must be below the student's vocabulary of 20"),
    "bucket id": Broken(4, row("token_ids_PK", 4, [20, 1, 2]), "must be below the student's vocabulary", "bucket"),
    "draw": Broken(2, row("tail_token_ids_PN", 2, [99, 0]), "must be below the student's vocabulary of 20"),
    "huge draw": Broken(2, row("tail_token_ids_PN", 2, [2**31, 0]), "must be below the student's vocabulary of 20"),
    "no entry": Broken(3, row("token_ids_PK", 3, -1), "must have an entry", "bucket"),
    "no entry or draw": Broken(
        3, row("token_ids_PK", 3, -1) | row("tail_token_ids_PN", 3, -1), "must have an entry or, for `sampled`"
    ),
    "twice": Broken(3, row("token_ids_PK", 3, [TWICE, TWICE, -1]), "must not be repeated", "renorm"),
    "a draw of the support": Broken(5, row("tail_token_ids_PN", 5, [IN_DRAWS, 0]), "must not be repeated"),
    "nan": Broken(1, row("logprobs_PK", 1, torch.nan), "between 0.5 and 2"),
    "no mass": Broken(
        1, row("logprobs_PK", 1, -9.0) | row("log_tail_mass_P", 1, -9.0), "between 0.5 and 2", "truncated"
    ),
    "too much mass": Broken(1, row("logprobs_PK", 1, 1.0), "between 0.5 and 2", "to_label"),
    "tail nan": Broken(0, row("log_tail_mass_P", 0, torch.nan), "between 0.5 and 2"),
    "tail inf": Broken(0, row("log_tail_mass_P", 0, torch.inf), "between 0.5 and 2", "bucket"),
    "tail of more than all": Broken(0, row("log_tail_mass_P", 0, 1.0), "between 0.5 and 2", "bucket"),
    "no draw": Broken(2, row("tail_token_ids_PN", 2, -1), "must have tail samples"),
    "entropy nan": Broken(4, row("entropy_P", 4, torch.nan), "entropy must be finite"),
    "entropy inf": Broken(4, row("entropy_P", 4, -torch.inf), "entropy must be finite"),
    "reverse without a tail": Broken(
        2, row("log_tail_mass_P", 2, -torch.inf), "every outcome of the teacher must have mass", "reverse-bucket"
    ),
    "reverse without a head": Broken(
        2, row("log_tail_mass_P", 2, 0.0), "every outcome of the teacher must have mass", "reverse-bucket"
    ),
    "reverse with a zero": Broken(
        2,
        row("token_ids_PK", 2, [0, 1, 2]) | row("logprobs_PK", 2, [0.0, -torch.inf, -torch.inf]),
        "every outcome of the teacher must have mass",
        "reverse-bucket",
    ),
    "reverse on the support with a zero": Broken(
        2,
        row("token_ids_PK", 2, [0, 1, 2]) | row("logprobs_PK", 2, [0.0, -torch.inf, -torch.inf]),
        "every outcome of the teacher must have mass",
        "reverse-renorm_both",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_with_values_that_would_train_something_else(name: str) -> None:
    broken = BROKEN[name]
    with pytest.raises(ValueError, match=f"{re.escape(broken.message)}.*: not so at position {broken.position}$"):
        broken.run()
    assert torch.isfinite(broken.run(position_weight=torch.arange(6) != broken.position))


@pytest.mark.parametrize("name", ["draw", "huge draw", "a draw of the support", "no draw", "entropy nan"])
def test_draws_and_entropy_are_looked_at_only_where_they_are_used(name: str) -> None:
    assert torch.isfinite(replace(BROKEN[name], mode="bucket").run())


def test_a_support_of_the_whole_vocabulary_cannot_leave_a_tail() -> None:
    case = make_case(positions=2, vocab=3, k=3, ragged=False)
    rows = replace(case.rows, log_tail_mass_P=torch.full((2,), -5.0))
    with pytest.raises(ValueError, match="covers the vocabulary must have an empty tail: not so at position 0"):
        topk_kl(case.hidden.float(), case.weight.float(), rows, tail="bucket")


def test_the_position_named_is_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PART_SIZE", 2)
    rows = replace(ROWS, token_ids_PK=at(ROWS.token_ids_PK, (5, 0), 20))
    with pytest.raises(ValueError, match="position 5"):
        topk_kl(CASE.hidden, CASE.weight, rows, position_weight=torch.tensor([0, 1, 0, 1, 1, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "full"}, "tail must be one of auto, sampled, bucket, .*, to_label, got 'full'"),
        ({"divergence": "backward"}, "divergence must be one of forward, reverse, jsd, got 'backward'"),
        ({"reduction": "batchmean"}, "reduction must be one of mean, sum, none, got 'batchmean'"),
        ({"impl": "cuda"}, "impl must be one of auto, triton, torch, reference"),
        ({"backward": "twice"}, "backward must be one of None, in_forward, recompute"),
        ({"reduction": "none", "backward": "in_forward"}, "backward must be 'recompute'"),
        ({"temperature": 0.0, "tail": "renorm"}, "temperature must be finite and positive, got 0.0"),
        ({"temperature": 2.0}, r"temperature is 2\.0, but a tail stored at temperature 1 cannot be had at another"),
        ({"temperature": 2.0, "tail": "to_label", "labels": LABELS}, "cannot be had at another"),
        ({"temperature": 2.0, "tail": "renorm", "ce_weight": 0.3, "labels": LABELS}, "add it by a call of its own"),
        ({"t2_scaling": True, "tail": "renorm"}, "t2_scaling is set, but temperature is 1"),
        ({"tail": "renorm_both", "ce_weight": 0.3, "labels": LABELS}, "renorm_both has no logits off the support"),
        ({"logit_scale": -1.0}, "logit_scale must be finite and positive, got -1.0"),
        ({"logit_scale": torch.inf}, "logit_scale must be finite and positive, got inf"),
        ({"softcap": 0.0}, "softcap must be finite and positive, got 0.0"),
        ({"divergence": "jsd", "tail": "bucket", "beta": 1.0}, "beta must lie between 0 and 1, got 1.0"),
        ({"divergence": "reverse", "tail": "truncated"}, "tail must be one of bucket, renorm_both, .*'truncated'"),
        ({"tail": "to_label"}, "tail is 'to_label' and ce_weight 0.0, but there are no labels"),
        ({"ce_weight": 1.5, "labels": LABELS}, "ce_weight must be from 0 to 1, got 1.5"),
        ({"ce_weight": torch.nan, "labels": LABELS}, "ce_weight must be from 0 to 1"),
        ({"ce_weight": 0.3}, "ce_weight 0.3, but there are no labels"),
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
        ({"logits_dtype": torch.float16}, "logits_dtype must be torch.float64, .* got torch.float16"),
        ({"accumulator_dtype": torch.int8}, "accumulator_dtype must be torch.float64, .* got torch.int8"),
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


ROW_OPTIONS: dict[str, Any] = {"tail": "bucket", "impl": "triton"}


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        (torch.float64, {}, "it computes in float32; use 'torch' for float64"),
        (torch.float32, {"tail": "renorm_both"}, "renorm_both has no logits to read; use 'torch'"),
    ],
)
def test_what_the_kernel_does_not_do(dtype: torch.dtype, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"impl is 'triton', but {message}"):
        topk_kl(CASE.hidden.to(dtype), CASE.weight.to(dtype), ROWS, **ROW_OPTIONS | change)


def test_the_kernel_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_chunks, "INTERPRETED", False)
    with pytest.raises(ValueError, match="impl is 'triton', but it runs on a GPU, and hidden is on cpu"):
        topk_kl(CASE.hidden.float(), CASE.weight.float(), ROWS, **ROW_OPTIONS)
