"""Rows of every kind: repeats, labels among them, no support, own weights, padding, masks, a smaller vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_trainer_kl_cases import (
    MODES,
    TAILS,
    Case,
    arguments,
    assert_close,
    differentiate,
    from_logits,
    log32,
    make_case,
    make_rows,
    normal,
    options,
    rows_of,
)
from torch import Tensor

from teachercache.trainer.kl import TeacherRows, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")


def test_equal_draws_add_up_and_padding_is_none() -> None:
    logits, t = normal(2, 9, seed=2), 0.5
    rows = rows_of([[1]] * 2, [[0.5]] * 2, [log32(t)] * 2, [[4, 4, 4, 7], [-1, 0, 4, -1]])
    _, gradient = from_logits(logits, rows, torch.float64, tail="sampled")
    target = torch.zeros(2, 9, dtype=torch.float64)
    target[0, 1], target[0, 4], target[0, 7] = 0.5, 0.75 * t, 0.25 * t
    target[1, 1], target[1, 0], target[1, 4] = 0.5, 0.5 * t, 0.5 * t
    torch.testing.assert_close(gradient, logits.softmax(1) - target, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("tail", ["sampled", "to_label", "renorm"])
def test_label_in_the_support_among_the_draws_and_elsewhere(tail: str) -> None:
    logits = normal(3, 9, seed=3)
    rows = rows_of([[1, 0]] * 3, [[0.5, 0.25]] * 3, [log32(0.25)] * 3, [[4, 4]] * 3)
    labels = torch.tensor([0, 4, 8])
    _, gradient = from_logits(logits, rows, torch.float64, tail=tail, labels=labels, ce_weight=0.25)
    target, each = torch.zeros(3, 9, dtype=torch.float64), torch.arange(3)
    if tail == "renorm":
        target[:, 1], target[:, 0] = 0.75 * 2 / 3, 0.75 / 3
    else:
        target[:, 1], target[:, 0] = 0.375, 0.1875
        target[each, labels if tail == "to_label" else 4] += 0.1875
    target[each, labels] += 0.25
    torch.testing.assert_close(gradient, logits.softmax(1) - target, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_never_read(mode: str) -> None:
    case = make_case(k=6)
    padding, chosen = case.rows.token_ids_PK < 0, options(case, mode)
    assert padding.any()
    for garbage in (torch.nan, torch.inf, 0.0):
        logprobs = torch.where(padding, garbage, case.rows.logprobs_PK)
        other = replace(case, rows=replace(case.rows, logprobs_PK=logprobs))
        assert_close(other.run(**chosen), case.run(**chosen), relative=0.0)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_a_row_s_entries_means_nothing(mode: str) -> None:
    case = make_case(k=6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    rows = replace(
        case.rows,
        token_ids_PK=case.rows.token_ids_PK[:, order],
        logprobs_PK=case.rows.logprobs_PK[:, order],
        tail_token_ids_PN=case.rows.tail_token_ids_PN.flip(1),
    )
    chosen = options(case, mode)
    assert_close(replace(case, rows=rows).run(**chosen), case.run(**chosen), relative=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_narrow_ids_are_the_same_ids(mode: str) -> None:
    case = make_case()
    rows = case.rows
    narrow = replace(rows, token_ids_PK=rows.token_ids_PK.int(), tail_token_ids_PN=rows.tail_token_ids_PN.int())
    for impl in ("torch", "reference"):
        chosen = options(case, mode, impl=impl)
        assert_close(replace(case, rows=narrow).run(**chosen), case.run(**chosen), relative=0.0)


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("reverse")])
def test_stored_zero_probabilities_are_outcomes_of_no_weight(mode: str) -> None:
    logits, rows = normal(1, 9, seed=4), rows_of([[1, 2]], [[0.75, 0.0]], [log32(0.25)], [[4, 7]])
    chosen = arguments(mode, torch.tensor([3]))
    loss, gradient = from_logits(logits, rows, torch.float64, **chosen)
    truth, expected = from_logits(logits, rows, torch.float64, impl="reference", **chosen)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(gradient, expected)
    assert torch.isfinite(gradient).all()


def test_a_sampled_support_with_weights_of_its_own_is_truncated_without_a_tail() -> None:
    # n draws from the whole distribution, weighed count / n: what others call random sampling distillation.
    logits = normal(2, 9, seed=5)
    rows = rows_of([[7, 2, 4], [0, 8, -1]], [[0.5, 0.375, 0.125], [0.75, 0.25, 0.0]], [-torch.inf] * 2, [[-1], [-1]])
    target = torch.zeros(2, 9, dtype=torch.float64)
    target[0, 7], target[0, 2], target[0, 4], target[1, 0], target[1, 8] = 0.5, 0.375, 0.125, 0.75, 0.25
    loss, gradient = from_logits(logits, rows, torch.float64, tail="truncated")
    torch.testing.assert_close(gradient, logits.softmax(1) - target, rtol=1e-7, atol=1e-7)
    expected = (torch.xlogy(target, target) - target * logits.log_softmax(1)).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_of_draws_alone(dtype: torch.dtype) -> None:
    # 0 + 25: no head at all, every token is drawn from what is then the whole distribution.
    logits = normal(2, 9, seed=6)
    logits[:, 0] = 5.0
    draws = torch.randint(9, (2, 25), generator=torch.Generator().manual_seed(0)).tolist()
    rows = rows_of([[-1], [-1]], [[0.0], [0.0]], [0.0, 0.0], draws)
    loss, gradient = from_logits(logits, rows, dtype, tail="sampled")
    target = torch.zeros(2, 9, dtype=torch.float64)
    for row, ids in zip(target, draws, strict=True):
        for v in ids:
            row[v] += 1 / 25
    torch.testing.assert_close(gradient.double(), logits.softmax(1) - target, rtol=1e-6, atol=1e-6)
    assert float(loss) == pytest.approx(-0.5 * 2 - float((target * logits.log_softmax(1)).sum()), abs=1e-5)
    for impl in ("torch", "reference"):
        _, stats = topk_kl(logits.to(dtype), torch.eye(9, dtype=dtype), rows, return_stats=True, impl=impl)
        assert stats.support_mass == 0
        # Nothing is known of the teacher's likeliest token, though the student's is the first of all.
        assert stats.top1_agreement == 0


@pytest.mark.parametrize("backward", ["in_forward", "recompute", "none"])
@pytest.mark.parametrize("how", ["weights", "labels"])
@pytest.mark.parametrize("mode", MODES)
def test_masked_positions_are_never_read(mode: str, how: str, backward: str) -> None:
    case = make_case(positions=8)
    masked, labels = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1], dtype=torch.bool), case.labels.clamp(min=0)
    kept = replace(case, hidden=case.hidden[~masked], rows=case.rows.select(~masked), labels=labels[~masked])
    rows = replace(
        case.rows,
        token_ids_PK=case.rows.token_ids_PK.masked_fill(masked[:, None], 10**9),
        logprobs_PK=case.rows.logprobs_PK.masked_fill(masked[:, None], torch.nan),
        log_tail_mass_P=case.rows.log_tail_mass_P.masked_fill(masked, torch.nan),
    )
    hidden = case.hidden.masked_fill(masked[:, None], torch.nan)
    poisoned = replace(case, hidden=hidden, rows=rows, labels=labels.masked_fill(masked, -7))
    mask: dict[str, Any] = {"position_weight": ~masked} if how == "weights" else {"ignore_index": -7}
    way = {"reduction": "sum", "backward": "in_forward"} if backward == "none" else {"backward": backward}
    shape = "mixed" if mode in TAILS and mode != "renorm_both" else "plain"
    expected = kept.run(**options(kept, mode, shape, **way) | {"labels": kept.labels})
    chosen = options(poisoned, mode, shape, **mask) | {"labels": poisoned.labels}
    actual = summed(poisoned, masked, chosen) if backward == "none" else poisoned.run(**chosen, **way)
    for name in ("loss", "weight", "bias"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))
    torch.testing.assert_close(actual.hidden[~masked], expected.hidden)
    assert (actual.hidden[masked] == 0).all()


def summed(case: Case, masked: Tensor, chosen: dict[str, Any]) -> Any:
    """The losses of `reduction="none"`, which are 0 where masked, added up."""
    leaves = case.leaves(torch.float64)
    losses = topk_kl(*leaves[:2], case.rows, bias=leaves[2], reduction="none", **chosen)
    assert losses.shape == masked.shape
    assert (losses[masked] == 0).all()
    return differentiate(losses.sum(), *leaves)


WAYS: dict[str, dict[str, Any]] = {
    "mean": {},
    "recompute": {"backward": "recompute"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "reference": {"impl": "reference"},
    "of 0 items": {"num_items": 0},
    "of 12 items": {"num_items": 12},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["weights", "labels"])
@pytest.mark.parametrize("mode", MODES)
def test_batch_without_a_counted_position(mode: str, how: str, way: str) -> None:
    case = make_case(positions=3)
    masks = {"weights": {"position_weight": torch.zeros(3)}, "labels": {"labels": torch.full((3,), -100)}}
    leaves = case.leaves(torch.float64)
    chosen = options(case, mode, **WAYS[way]) | masks[how]
    loss = topk_kl(*leaves[:2], case.rows, bias=leaves[2], **chosen)
    assert loss.shape == ((3,) if way == "none" else ())
    assert (loss == 0).all()
    loss.sum().backward()
    for leaf in leaves:
        assert (leaf.grad == 0).all()


def smaller(rows: TeacherRows, vocab: int) -> tuple[TeacherRows, int]:
    kept, dropped = rows.within(vocab)
    assert int((kept.token_ids_PK >= vocab).sum()) == 0
    return kept, dropped


def test_rows_of_a_smaller_vocabulary_are_the_teacher_s_given_that_vocabulary() -> None:
    teacher = normal(40, 24, seed=7) * 2
    rows = make_rows(teacher, torch.full((40,), 6), 6, 4, torch.full((40,), 0.5, dtype=torch.float64))
    kept, dropped = smaller(rows, 20)
    outside = (rows.token_ids_PK >= 20).sum() + (rows.tail_token_ids_PN >= 20).sum()
    assert dropped == int(outside) > 0
    mass = kept.logprobs_PK.exp().sum(1) + kept.log_tail_mass_P.exp()
    torch.testing.assert_close(mass, torch.ones(40))
    # Probabilities of what is left keep their ratios.
    both = (kept.token_ids_PK >= 0) & (kept.token_ids_PK >= 0).roll(1, 1)
    before, after = ((r.logprobs_PK - r.logprobs_PK.roll(1, 1))[both] for r in (rows, kept))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(topk_kl(normal(40, 5), normal(20, 5, seed=1), kept))
    with pytest.raises(ValueError, match="below the student's vocabulary of 20"):
        topk_kl(normal(40, 5), normal(20, 5, seed=1), rows)


def test_rows_that_fit_are_given_back_as_they_are() -> None:
    rows = make_case().rows
    same, dropped = rows.within(61)
    assert same is rows
    assert dropped == 0


@pytest.mark.parametrize("lost", [1.0, 1 - 1e-6, 1.001])
def test_what_is_left_beside_a_likely_token_of_another_vocabulary_is_a_distribution(lost: float) -> None:
    # Stored logprobs are rounded: a lost token may hold more than the mass that the others leave.
    rows = rows_of([[25, 1, 2]], [[lost, 3e-7, 1e-7]], [log32(1e-7)], [[5, 30]])
    kept, dropped = smaller(rows, 20)
    assert dropped == 2
    expected = torch.tensor([0.0, 3e-7, 1e-7, 5e-8]) / 4.5e-7
    torch.testing.assert_close(
        torch.cat([kept.logprobs_PK[0], kept.log_tail_mass_P]).exp(), expected, rtol=1e-5, atol=0.0
    )


def test_a_row_that_is_all_of_another_vocabulary_has_no_entry() -> None:
    rows = rows_of([[25, -1], [1, 2]], [[1.0, 0.0], [0.5, 0.499]], [-torch.inf] * 2, [[-1], [-1]])
    kept, dropped = smaller(rows, 20)
    assert dropped == 1
    assert (kept.token_ids_PK[0] < 0).all()
    assert (kept.logprobs_PK[0] == -torch.inf).all()
    # What lost nothing is left as it was stored.
    assert torch.equal(kept.logprobs_PK[1], rows.logprobs_PK[1])
    with pytest.raises(ValueError, match=r"must have an entry .*: not so at position 0"):
        topk_kl(normal(2, 20), torch.eye(20).double(), kept)
    assert torch.isfinite(
        topk_kl(normal(2, 20), torch.eye(20).double(), kept, position_weight=torch.tensor([0.0, 1.0]))
    )
