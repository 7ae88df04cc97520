"""The fused loss and its gradients against float64 autograd over the dense definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer_kl_cases import TAILS, Case, Result, assert_close, differentiate, make_case
from torch import Tensor

from teachercache.trainer.kl import topk_kl

# With and without cross-entropy from the same pass, and cross-entropy alone.
MIXES = (0.0, 0.3, 1.0)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def options(case: Case, tail: str, ce_weight: float) -> dict[str, Any]:
    return {"tail": tail, "ce_weight": ce_weight, "labels": case.labels if ce_weight else None}


def assert_no_worse_than_plain(actual: Result, plain: Result, truth: Result, tolerance: float) -> None:
    """Norm-wise and at the worst element: no larger an error than plain PyTorch's in that dtype."""
    for name, expected in truth.items():
        error, allowed = ((getattr(result, name).double() - expected).abs() for result in (actual, plain))
        for measure in (torch.linalg.vector_norm, torch.max):
            bound = measure(allowed) + tolerance * max(1e-3, float(measure(expected.abs())))
            assert measure(error) <= bound, f"{name}: {measure(error):.2e} > {bound:.2e}"


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("ce_weight", MIXES)
@pytest.mark.parametrize("tail", TAILS)
def test_is_the_definition_in_float64(tail: str, ce_weight: float, bias: bool) -> None:
    case = make_case(bias=bias)
    mode = options(case, tail, ce_weight)
    assert_close(case.run(**mode, chunk_bytes=1500), case.run(**mode, impl="reference"), relative=1e-13)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("ce_weight", MIXES)
@pytest.mark.parametrize("tail", TAILS)
def test_errs_no_more_than_plain_pytorch(tail: str, ce_weight: float, bias: bool, dtype: torch.dtype) -> None:
    case = make_case(positions=33, vocab=523, width=61, k=9, samples=7, bias=bias)
    mode = options(case, tail, ce_weight)
    actual = case.run(dtype, **mode, chunk_bytes=30_000)
    for name, value in actual.items():
        assert value.dtype == (torch.float32 if name == "loss" else dtype)
    assert_no_worse_than_plain(actual, case.plain(dtype, **mode), case.truth(dtype, **mode), TOLERANCE[dtype])


@pytest.mark.parametrize("ce_weight", MIXES)
@pytest.mark.parametrize("tail", TAILS)
def test_gradcheck(tail: str, ce_weight: float) -> None:
    case = make_case(positions=4, vocab=13, width=3, k=3)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return topk_kl(hidden, weight, case.rows, bias=bias, chunk_bytes=200, **options(case, tail, ce_weight))

    assert torch.autograd.gradcheck(loss, case.leaves(torch.float64))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 40), "vocab")
    case = make_case(
        positions=data.draw(st.integers(1, 9), "positions"),
        vocab=vocab,
        width=data.draw(st.integers(1, 6), "width"),
        k=data.draw(st.integers(1, min(vocab, 8)), "k"),
        samples=data.draw(st.integers(1, 5), "samples"),
        bias=data.draw(st.booleans(), "bias"),
        ragged=data.draw(st.booleans(), "ragged"),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    mode = options(case, data.draw(st.sampled_from(TAILS), "tail"), data.draw(st.sampled_from(MIXES), "ce_weight"))
    chunk_bytes = data.draw(st.integers(1, 4000), "chunk_bytes")
    assert_close(case.run(**mode, chunk_bytes=chunk_bytes), case.run(**mode, impl="reference"), relative=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_chunks_make_no_difference(tail: str, dtype: torch.dtype) -> None:
    case = make_case(positions=23)
    whole = case.run(dtype, tail=tail)
    for chunk_bytes in (1, 3 * 61 * 8, 1 << 14):
        relative = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
        assert_close(case.run(dtype, tail=tail, chunk_bytes=chunk_bytes), whole, relative=relative)


def test_upstream_gradient_scales_both_gradients_and_backward_may_run_twice() -> None:
    case = make_case()
    hidden, weight, _ = case.leaves(torch.float32)
    loss = topk_kl(hidden, weight, case.rows)
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = torch.autograd.grad(-3.0 * loss, (hidden, weight))
    for before, after in zip(once, scaled, strict=True):
        torch.testing.assert_close(after, -3.0 * before)


@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
def test_unequal_micro_batches_are_one_batch(ce_weight: float) -> None:
    case = make_case(positions=23)
    hidden, weight, bias = case.leaves(torch.float64)
    counted = int((case.labels != -100).sum())
    whole = topk_kl(hidden, weight, case.rows, labels=case.labels, ce_weight=ce_weight, bias=bias)
    expected = torch.autograd.grad(whole, (hidden, weight, bias))
    total = torch.zeros((), dtype=torch.float64)
    for part in (slice(0, 2), slice(2, 19), slice(19, 23)):
        loss = topk_kl(
            hidden[part],
            weight,
            case.rows.select(part),
            labels=case.labels[part],
            ce_weight=ce_weight,
            bias=bias,
            num_items=torch.tensor(counted),
        )
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.detach())
    for actual, wanted in zip((hidden.grad, weight.grad, bias.grad), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-15)


def test_position_weights_weigh_and_normalise() -> None:
    case = make_case(positions=6, bias=False)
    weights = torch.tensor([2.0, 0.0, 0.5, 1.0, 0.0, 3.0])
    each = torch.stack(
        [topk_kl(case.hidden[i : i + 1], case.weight, case.rows.select(slice(i, i + 1))) for i in range(6)]
    )
    summed = topk_kl(case.hidden, case.weight, case.rows, position_weight=weights, reduction="sum")
    mean = topk_kl(case.hidden, case.weight, case.rows, position_weight=weights)
    torch.testing.assert_close(summed, (each * weights).sum())
    torch.testing.assert_close(mean, summed / weights.sum())
    mixed = {"position_weight": weights, "labels": case.labels.clamp(min=0), "ce_weight": 0.3}
    assert_close(case.run(**mixed), case.run(**mixed, impl="reference"), relative=1e-13)


def test_float16_gradients_survive_a_count_that_would_push_them_out_of_range() -> None:
    case = make_case(positions=33, vocab=523, width=61, bias=False)
    hidden, weight, _ = case.leaves(torch.float16)
    num_items, loss_scale = 2**24, 2.0**20
    (topk_kl(hidden, weight, case.rows, num_items=num_items) * loss_scale).backward()
    truth = case.truth(torch.float16, num_items=num_items)
    for actual, expected in ((hidden.grad, truth.hidden), (weight.grad, truth.weight)):
        error = (actual.double() / loss_scale - expected).norm() / expected.norm()
        assert error < 1e-2


@pytest.mark.parametrize("tail", TAILS)
def test_autocast_rounds_the_operands_and_nothing_else(tail: str) -> None:
    case = make_case(positions=33, vocab=523, width=61)
    with torch.autocast("cpu", torch.bfloat16):
        actual = case.run(torch.float32, tail=tail)
    rounded = case.rounded(torch.bfloat16)
    # The bias is added to float32 logits, so autocast leaves it alone.
    exact = Case(rounded.hidden, rounded.weight, case.bias, case.rows, case.labels, case.teacher_logits)
    assert_close(actual, exact.run(torch.float32, tail=tail), relative=1e-6)
    assert {value.dtype for _, value in actual.items()} == {torch.float32}


@pytest.mark.parametrize(("dtype", "impl"), [(torch.float64, "torch"), (torch.float32, "reference")])
def test_autocast_leaves_float64_and_the_reference_alone(dtype: torch.dtype, impl: str) -> None:
    case = make_case()
    leaves = case.leaves(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = topk_kl(*leaves[:2], case.rows, bias=leaves[2], impl=impl)
    assert_close(differentiate(loss, *leaves), case.run(dtype, impl=impl), relative=0.0)


def test_autocast_around_a_model() -> None:
    case = make_case(positions=17, width=6, bias=False)
    body = torch.nn.Linear(6, 6)
    head = torch.nn.Linear(6, 61, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(case.hidden.float())
        assert hidden.dtype == torch.bfloat16
        loss = topk_kl(hidden, head.weight, case.rows)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() and p.grad.norm() > 0 for p in (*body.parameters(), *head.parameters()))


def test_mixed_dtypes_meet_in_the_wider_one() -> None:
    case = make_case(bias=False)
    hidden, weight = case.hidden.bfloat16().requires_grad_(), case.weight.float().requires_grad_()
    topk_kl(hidden, weight, case.rows).backward()
    exact = Case(hidden.detach().double(), case.weight, None, case.rows, case.labels, case.teacher_logits)
    expected = exact.run(torch.float32)
    torch.testing.assert_close(weight.grad, expected.weight)
    torch.testing.assert_close(hidden.grad, expected.hidden.bfloat16())
