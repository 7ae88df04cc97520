"""Where losses of this kind break: confident students, empty and tiny tails, closed columns, unwritten memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_trainer_kl_cases import (
    FULL_MODES,
    MODES,
    TAILS,
    Case,
    arguments,
    assert_close,
    from_logits,
    make_case,
    normal,
    options,
    rows_of,
)

from teachercache.trainer.kl import TeacherRows, topk_kl
from teachercache.trainer.kl.objective import Objective
from teachercache.trainer.kl.targets import build_targets

pytestmark = pytest.mark.usefixtures("one_thread")

NATS_32 = 5e-6


@pytest.mark.parametrize("log_gap", [0.0, 3.0, -3.0])
@pytest.mark.parametrize("confidence", [10.0, 17.0, 25.0, 60.0, 100.0])
@pytest.mark.parametrize("mode", FULL_MODES)
def test_tail_keeps_its_digits_when_the_student_is_confident(mode: str, confidence: float, log_gap: float) -> None:
    # 1 - Q is about exp(-confidence): 1 in float32 from 17 on. The teacher's tail is log_gap nats larger.
    logits = normal(1, 64)
    logits[0, 5] = logits[0, 6:].logsumexp(0) + confidence
    logits[0, :5] = -200.0
    log_tail = -confidence + log_gap
    rows = rows_of([[5]], [[1.0]], [log_tail], [[9]])
    chosen = arguments(mode, torch.tensor([11]))
    loss, gradient = from_logits(logits, rows, torch.float32, **chosen)
    truth, expected = from_logits(logits, rows, torch.float64, impl="reference", **chosen)
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
@pytest.mark.parametrize("log_tail", [-torch.inf, float(torch.tensor(1e-30).log()), -80.0, -120.0])
@pytest.mark.parametrize("tail", TAILS)
def test_empty_and_tiny_tails(tail: str, log_tail: float, dtype: torch.dtype) -> None:
    logits = normal(2, 9, seed=1) * 3
    draws = [[-1, -1], [7, 7]] if log_tail == -torch.inf else [[5, 5], [7, 4]]
    rows = rows_of([[1, 2], [3, -1]], [[0.75, 0.25], [1.0, 0.0]], [log_tail, log_tail], draws)
    loss, gradient = from_logits(logits, rows, dtype, **arguments(tail, torch.tensor([2, 8])))
    p = torch.zeros(2, 9, dtype=torch.float64)
    p[0, 1], p[0, 2], p[1, 3] = 0.75, 0.25, 1.0
    if tail == "renorm_both":
        logits = logits.masked_fill(p == 0, -1e4)
    constant = -0.5 * 2 if tail == "sampled" else float(torch.xlogy(p, p).sum())
    assert float(loss) == pytest.approx(constant - float((p * logits.log_softmax(1)).sum()), abs=1e-5)
    torch.testing.assert_close(gradient.double(), logits.softmax(1) - p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("log_tail", [float(torch.tensor(1e-30).log()), -80.0, -120.0])
def test_reverse_keeps_its_digits_where_the_teacher_s_tail_is_tiny(log_tail: float) -> None:
    # q_tail (log q_tail - log t) needs log t, and t is 0 in float32.
    logits, rows = normal(1, 9, seed=1), rows_of([[1, 2]], [[0.75, 0.25]], [log_tail], [[5]])
    loss, gradient = from_logits(logits, rows, torch.float32, **arguments("reverse-bucket", torch.tensor([0])))
    q = logits.softmax(1)[0].requires_grad_()
    outcomes = torch.stack([q[1], q[2], 1 - q[1] - q[2]])
    expected = (outcomes * (outcomes.log() - torch.tensor([0.75, 0.25, 1.0]).double().log())).sum() - outcomes[
        2
    ] * log_tail
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    (slope,) = torch.autograd.grad(expected, q)
    in_logits = q.detach() * (slope - (q.detach() * slope).sum())
    torch.testing.assert_close(gradient[0].double(), in_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_support_that_covers_the_vocabulary(mode: str, dtype: torch.dtype) -> None:
    case = make_case(vocab=9, k=9, ragged=False)
    assert (case.rows.log_tail_mass_P == -torch.inf).all()
    hidden, weight, bias = case.leaves(dtype)
    labels = case.labels.clamp(min=0)
    topk = topk_kl(hidden, weight, case.rows, bias=bias, **arguments(mode, labels))
    topk.backward()
    logits = (case.hidden @ case.weight.t() + case.bias).requires_grad_()
    log_p, log_q = case.teacher_logits.log_softmax(1), logits.log_softmax(1)
    if mode.startswith("reverse"):
        full = (log_q.exp() * (log_q - log_p)).sum(1).mean()
    elif mode.startswith("jsd"):
        log_m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
        full = (0.3 * log_p.exp() * (log_p - log_m) + 0.7 * log_q.exp() * (log_q - log_m)).sum(1).mean()
    else:
        full = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    assert float(topk.detach()) == pytest.approx(float(full.detach()), abs=1e-5)
    full.backward()
    torch.testing.assert_close(hidden.grad.double(), logits.grad @ case.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_rows_with_and_without_a_tail_side_by_side(mode: str) -> None:
    whole, partial = make_case(vocab=6, k=6, ragged=False), make_case(vocab=6, k=6, ragged=True, seed=1)
    assert partial.rows.tail_token_ids_PN is not None
    both = TeacherRows(
        *(torch.cat(pair) for pair in zip(vars(whole.rows).values(), vars(partial.rows).values(), strict=True))
    )
    hidden, labels = torch.cat([whole.hidden, partial.hidden]), torch.cat([whole.labels, partial.labels])
    case = Case(hidden, whole.weight, whole.bias, both, labels, whole.teacher_logits)
    chosen = options(case, mode)
    assert_close(case.run(**chosen), case.run(impl="reference", **chosen), relative=1e-13)
    for _, value in case.run(torch.float32, **chosen).items():
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", ["plain", "capped"])
@pytest.mark.parametrize("mode", MODES)
def test_padded_vocabulary_columns_take_no_part(mode: str, shape: str, impl: str) -> None:
    # Real heads are padded to a multiple of 64 or 128; a bias of -inf closes such columns.
    case = make_case(positions=7, vocab=20)
    weight = torch.cat([case.weight, torch.ones(4, 7, dtype=torch.float64)])
    assert case.bias is not None
    bias = torch.cat([case.bias, torch.full((4,), -torch.inf, dtype=torch.float64)])
    padded, chosen = replace(case, weight=weight, bias=bias), options(case, mode, shape, impl=impl)
    actual, expected = padded.run(**chosen), case.run(**chosen)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.hidden, expected.hidden)
    torch.testing.assert_close(actual.weight, F.pad(expected.weight, (0, 0, 0, 4)))
    torch.testing.assert_close(actual.bias, F.pad(expected.bias, (0, 4)))


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_a_closed_column_that_the_teacher_uses(mode: str, impl: str) -> None:
    case = make_case(positions=3, vocab=20, ragged=False)
    assert case.bias is not None
    bias = case.bias.clone()
    bias[case.rows.token_ids_PK[:, 0]] = -torch.inf
    closed = replace(case, bias=bias, labels=torch.tensor([int(bias.argmax())] * 3))
    result = closed.run(impl=impl, **options(closed, mode))
    if mode in TAILS:
        assert result.loss == torch.inf
    else:
        # What the student can never say costs the reverse divergences nothing, or at most log(1 / beta).
        expected = replace(case, bias=torch.where(bias == -torch.inf, -1e3, bias)).run(**options(closed, mode))
        torch.testing.assert_close(result.loss, expected.loss)
        torch.testing.assert_close(result.hidden, expected.hidden)


@pytest.mark.parametrize("mode", FULL_MODES)
def test_an_objective_without_weight_is_not_evaluated(mode: str) -> None:
    # A closed column of the student that the teacher uses: its KL is infinite, and 0 * inf is NaN.
    case = make_case(positions=3, vocab=20)
    assert case.bias is not None
    bias = case.bias.clone()
    bias[case.rows.token_ids_PK[:, 0]] = -torch.inf
    closed, labels = replace(case, bias=bias), torch.tensor([int(bias.argmax())] * 3)
    for impl in ("torch", "reference"):
        for _, value in closed.run(**arguments(mode, labels, ce_weight=1.0, impl=impl)).items():
            assert torch.isfinite(value).all()
        mixed = closed.run(**arguments(mode, labels, ce_weight=0.5, impl=impl)).loss
        assert mixed == torch.inf if mode in TAILS else torch.isfinite(mixed)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "reverse-bucket"])
def test_tail_mass_that_was_rounded_to_more_than_one(mode: str) -> None:
    logits, rows = normal(1, 9, seed=6), rows_of([[1]], [[1e-8]], [1e-7], [[4, 7]])
    chosen = arguments(mode, torch.tensor([3]))
    loss, gradient = from_logits(logits, rows, torch.float32, **chosen)
    truth, expected = from_logits(logits, rows, torch.float64, impl="reference", **chosen)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_tiny_head_keeps_its_digits() -> None:
    rows = rows_of([[1]], [[1e-6]], [math.log1p(-1e-6)], [[4, 7]])
    weight = build_targets(rows, Objective("bucket"), None, torch.float32).support_weight_CK
    assert float(weight) == pytest.approx(1e-6, rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_large_logits_do_not_overflow(mode: str) -> None:
    case, logits = make_case(positions=4, vocab=30), normal(4, 30, seed=5)
    chosen = options(case, mode)
    loss, gradient = from_logits(logits * 100 + 1e4, case.rows, torch.float32, **chosen)
    exact = (logits * 100 + 1e4).float().double()
    truth, expected = from_logits(exact, case.rows, torch.float64, impl="reference", **chosen)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize(("size", "cap"), [(1e-4, 30.0), (1.0, 1e4), (30.0, 30.0), (1e4, 30.0)])
def test_softcap_is_exact_from_the_smallest_to_the_largest_logits(size: float, cap: float) -> None:
    case, logits = make_case(positions=4, vocab=30), normal(4, 30, seed=5).mul(size).float().double()
    loss, gradient = from_logits(logits, case.rows, torch.float32, softcap=cap)
    truth, expected = from_logits(logits, case.rows, torch.float64, softcap=cap, impl="reference")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_element_is_written(mode: str, dtype: torch.dtype, backward: str) -> None:
    assert torch.empty(5).isnan().all()
    case = make_case(positions=13)
    shape = "everything" if mode in FULL_MODES else "capped"
    chosen = options(case, mode, shape, backward=backward, chunk_bytes=2000)
    for _, value in case.run(dtype, **chosen).items():
        assert torch.isfinite(value).all()
    leaves = case.leaves(dtype)
    _, stats = topk_kl(*leaves[:2], case.rows, bias=leaves[2], return_stats=True, **chosen)
    assert torch.isfinite(stats.kl + stats.tail_kl + stats.support_mass + stats.top1_agreement)
