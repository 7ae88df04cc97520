"""Where losses of this kind break: confident rows, empty and tiny tails, repeats, padding, masks, unwritten memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_trainer_kl_cases import TAILS, Case, assert_close, make_case
from torch import Tensor

from teachercache.trainer.kl import TeacherRows, topk_kl
from teachercache.trainer.kl.targets import build_targets

pytestmark = pytest.mark.usefixtures("one_thread")

NATS_32 = 5e-6


def rows_of(
    ids: list[list[int]], probabilities: list[list[float]], log_tail: list[float], draws: list[list[int]]
) -> TeacherRows:
    return TeacherRows(
        torch.tensor(ids),
        torch.tensor(probabilities).log(),
        torch.tensor(log_tail),
        torch.tensor(draws),
        torch.full((len(ids),), 0.5),
    )


def from_logits(logits: Tensor, rows: TeacherRows, dtype: torch.dtype, **options: object) -> tuple[Tensor, Tensor]:
    """Loss and its gradient in the logits: hidden states are the logits, the head is the identity."""
    hidden = logits.detach().to(dtype, copy=True).requires_grad_()
    loss = topk_kl(hidden, torch.eye(logits.shape[1], dtype=dtype), rows, reduction="sum", **options)
    loss.backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


@pytest.mark.parametrize("log_gap", [0.0, 3.0, -3.0])
@pytest.mark.parametrize("confidence", [10.0, 17.0, 25.0, 60.0, 100.0])
def test_tail_keeps_its_digits_when_the_student_is_confident(confidence: float, log_gap: float) -> None:
    # 1 - Q is about exp(-confidence): 1 in float32 from 17 on. The teacher's tail is log_gap nats larger.
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[0, 5] = logits[0, 6:].logsumexp(0) + confidence
    logits[0, :5] = -200.0
    log_tail = -confidence + log_gap
    rows = rows_of([[5]], [[1.0]], [log_tail], [[9]])
    for tail in ("bucket", "sampled"):
        loss, gradient = from_logits(logits, rows, torch.float32, tail=tail)
        truth, expected = from_logits(logits, rows, torch.float64, tail=tail, impl="reference")
        assert abs(float(loss) - float(truth)) < NATS_32 * max(1.0, abs(float(truth)))
        # Relative to the tail itself; float32 cannot hold e^-100, which must then be 0 and not NaN.
        tail_mass = max(1.0, math.exp(log_gap)) * math.exp(-confidence)
        error = (gradient[:, 6:].double() - expected[:, 6:]).abs().max()
        assert error <= 2e-5 * tail_mass + torch.finfo(torch.float32).tiny


def test_the_subtraction_that_this_avoids_would_fail_there() -> None:
    """The test above means something only where 1 - Q is lost."""
    q = torch.tensor([17.0, 0.0]).softmax(0)
    assert 0 < torch.tensor([17.0, 0.0], dtype=torch.float64).softmax(0)[1] < 1e-7
    assert float(torch.log(1 - q[0])) != pytest.approx(-17.0, abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("log_tail", [-torch.inf, float(torch.tensor(1e-30).log()), -120.0])
@pytest.mark.parametrize("tail", TAILS)
def test_empty_and_tiny_tails(tail: str, log_tail: float, dtype: torch.dtype) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    draws = [[-1, -1], [7, 7]] if log_tail == -torch.inf else [[5, 5], [7, 4]]
    rows = rows_of([[1, 2], [3, -1]], [[0.75, 0.25], [1.0, 0.0]], [log_tail, log_tail], draws)
    loss, gradient = from_logits(logits, rows, dtype, tail=tail)
    p = torch.zeros(2, 9, dtype=torch.float64)
    p[0, 1], p[0, 2], p[1, 3] = 0.75, 0.25, 1.0
    constant = -0.5 * 2 if tail == "sampled" else float(torch.xlogy(p, p).sum())
    assert float(loss) == pytest.approx(constant - float((p * logits.log_softmax(1)).sum()), abs=1e-5)
    torch.testing.assert_close(gradient.double(), logits.softmax(1) - p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_support_that_covers_the_vocabulary(tail: str, dtype: torch.dtype) -> None:
    case = make_case(vocab=9, k=9, ragged=False)
    assert (case.rows.log_tail_mass_P == -torch.inf).all()
    hidden, weight, bias = case.leaves(dtype)
    loss = topk_kl(hidden, weight, case.rows, bias=bias, tail=tail)
    loss.backward()
    logits = case.hidden @ case.weight.t() + case.bias
    full = F.kl_div(logits.log_softmax(1), case.teacher_logits.log_softmax(1), log_target=True, reduction="batchmean")
    assert float(loss.detach()) == pytest.approx(float(full), abs=1e-5)
    error = (logits.softmax(1) - case.teacher_logits.softmax(1)) @ case.weight / len(hidden)
    torch.testing.assert_close(hidden.grad.double(), error, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
def test_rows_with_and_without_a_tail_side_by_side(tail: str) -> None:
    whole, partial = make_case(vocab=6, k=6, ragged=False), make_case(vocab=6, k=6, ragged=True, seed=1)
    assert partial.rows.tail_token_ids_PN is not None
    both = TeacherRows(
        *(torch.cat(pair) for pair in zip(vars(whole.rows).values(), vars(partial.rows).values(), strict=True))
    )
    hidden = torch.cat([whole.hidden, partial.hidden])
    case = Case(hidden, whole.weight, whole.bias, both, whole.labels, whole.teacher_logits)
    assert_close(case.run(tail=tail), case.run(tail=tail, impl="reference"), relative=1e-13)
    for _, value in case.run(torch.float32, tail=tail).items():
        assert torch.isfinite(value).all()


def test_equal_draws_add_up() -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    t = 0.5
    rows = rows_of([[1]], [[0.5]], [float(torch.tensor(t).log())], [[4, 4, 4, 7]])
    _, gradient = from_logits(logits, rows, torch.float64, tail="sampled")
    target = torch.zeros(1, 9, dtype=torch.float64)
    target[0, 1], target[0, 4], target[0, 7] = 0.5, 0.75 * t, 0.25 * t
    torch.testing.assert_close(gradient, logits.softmax(1) - target, rtol=1e-7, atol=1e-7)


def test_label_in_the_support_among_the_draws_and_elsewhere() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = rows_of([[1, 0]] * 3, [[0.5, 0.25]] * 3, [float(torch.tensor(0.25).log())] * 3, [[4, 4]] * 3)
    labels = torch.tensor([0, 4, 8])
    _, gradient = from_logits(logits, rows, torch.float64, tail="sampled", labels=labels, ce_weight=0.25)
    target = torch.zeros(3, 9, dtype=torch.float64)
    target[:, 1], target[:, 0], target[:, 4] = 0.375, 0.1875, 0.1875
    target[torch.arange(3), labels] += 0.25
    torch.testing.assert_close(gradient, logits.softmax(1) - target, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("tail", TAILS)
def test_padding_is_never_read(tail: str) -> None:
    case = make_case(k=6)
    padding = case.rows.token_ids_PK < 0
    assert padding.any()
    for garbage in (torch.nan, torch.inf, 0.0):
        logprobs = torch.where(padding, garbage, case.rows.logprobs_PK)
        other = replace(case, rows=replace(case.rows, logprobs_PK=logprobs))
        assert_close(other.run(tail=tail), case.run(tail=tail), relative=0.0)


@pytest.mark.parametrize("tail", TAILS)
def test_padded_vocabulary_columns_take_no_part(tail: str) -> None:
    # Real heads are padded to a multiple of 64 or 128; a bias of -inf closes such columns.
    case = make_case(positions=7, vocab=20)
    weight = torch.cat([case.weight, torch.ones(4, 7, dtype=torch.float64)])
    assert case.bias is not None
    bias = torch.cat([case.bias, torch.full((4,), -torch.inf, dtype=torch.float64)])
    padded = replace(case, weight=weight, bias=bias)
    actual, expected = padded.run(tail=tail), case.run(tail=tail)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.hidden, expected.hidden)
    torch.testing.assert_close(actual.weight, F.pad(expected.weight, (0, 0, 0, 4)))
    torch.testing.assert_close(actual.bias, F.pad(expected.bias, (0, 4)))


def test_an_objective_without_weight_is_not_evaluated() -> None:
    # A closed column of the student that the teacher uses: its KL is infinite, and 0 * inf is NaN.
    case = make_case(positions=3, vocab=20)
    assert case.bias is not None
    bias = case.bias.clone()
    bias[case.rows.token_ids_PK[:, 0]] = -torch.inf
    closed, labels = replace(case, bias=bias), torch.tensor([int(bias.argmax())] * 3)
    for impl in ("torch", "reference"):
        for _, value in closed.run(labels=labels, ce_weight=1.0, impl=impl).items():
            assert torch.isfinite(value).all()
        assert closed.run(labels=labels, ce_weight=0.5, impl=impl).loss == torch.inf


@pytest.mark.parametrize("tail", TAILS)
def test_tail_mass_that_was_rounded_to_more_than_one(tail: str) -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    rows = rows_of([[1]], [[1e-8]], [1e-7], [[4, 7]])
    loss, gradient = from_logits(logits, rows, torch.float32, tail=tail)
    truth, expected = from_logits(logits, rows, torch.float64, tail=tail, impl="reference")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_tiny_head_keeps_its_digits() -> None:
    rows = rows_of([[1]], [[1e-6]], [math.log1p(-1e-6)], [[4, 7]])
    weight = build_targets(rows, "bucket", torch.float32).support_weight_CK
    assert float(weight) == pytest.approx(1e-6, rel=1e-4)


@pytest.mark.parametrize("tail", TAILS)
def test_stored_zero_probabilities_are_outcomes_of_no_weight(tail: str) -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rows = rows_of([[1, 2]], [[0.75, 0.0]], [float(torch.tensor(0.25).log())], [[4, 7]])
    loss, gradient = from_logits(logits, rows, torch.float64, tail=tail)
    truth, expected = from_logits(logits, rows, torch.float64, tail=tail, impl="reference")
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(gradient, expected)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_items", [None, 0, 12])
@pytest.mark.parametrize("how", ["weights", "labels"])
def test_batch_without_a_counted_position(impl: str, reduction: str, num_items: int | None, how: str) -> None:
    case = make_case(positions=3)
    if reduction == "sum":
        num_items = None
    masks = {"weights": {"position_weight": torch.zeros(3)}, "labels": {"labels": torch.full((3,), -100)}}
    result = case.run(impl=impl, reduction=reduction, num_items=num_items, **masks[how])
    for _, value in result.items():
        assert (value == 0).all()


@pytest.mark.parametrize("how", ["weights", "labels"])
def test_masked_positions_are_never_read(how: str) -> None:
    case = make_case(positions=8)
    masked = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    kept = replace(
        case, hidden=case.hidden[~masked], rows=case.rows.select(~masked), labels=case.labels.clamp(min=0)[~masked]
    )
    rows = replace(
        case.rows,
        token_ids_PK=case.rows.token_ids_PK.masked_fill(masked[:, None], 10**9),
        logprobs_PK=case.rows.logprobs_PK.masked_fill(masked[:, None], torch.nan),
        log_tail_mass_P=case.rows.log_tail_mass_P.masked_fill(masked, torch.nan),
    )
    hidden = case.hidden.masked_fill(masked[:, None], torch.nan)
    poisoned = replace(case, hidden=hidden, rows=rows, labels=case.labels.clamp(min=0).masked_fill(masked, -7))
    if how == "weights":
        actual = poisoned.run(labels=poisoned.labels, ce_weight=0.5, position_weight=~masked)
    else:
        actual = poisoned.run(labels=poisoned.labels, ce_weight=0.5, ignore_index=-7)
    expected = kept.run(labels=kept.labels, ce_weight=0.5)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.weight, expected.weight)
    assert actual.hidden is not None
    torch.testing.assert_close(actual.hidden[~masked], expected.hidden)
    assert (actual.hidden[masked] == 0).all()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    case = make_case(positions=4, vocab=30)
    for tail in TAILS:
        loss, gradient = from_logits(logits * 100 + 1e4, case.rows, torch.float32, tail=tail)
        exact = (logits * 100 + 1e4).float().double()
        truth, expected = from_logits(exact, case.rows, torch.float64, tail=tail, impl="reference")
        torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-2)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=2e-3)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody wrote to reads as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_every_element_is_written(tail: str, dtype: torch.dtype) -> None:
    assert torch.empty(5).isnan().all()
    case = make_case(positions=13)
    result = case.run(dtype, tail=tail, labels=case.labels, ce_weight=0.3, chunk_bytes=2000)
    for _, value in result.items():
        assert torch.isfinite(value).all()
