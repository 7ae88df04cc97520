"""The fused loss in every dtype: no worse than plain PyTorch, however it is chunked, scaled, split or run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_trainer_kl_cases import (
    MODES,
    SHAPED_MODES,
    TOLERANCE,
    Case,
    Result,
    assert_close,
    assert_no_worse_than_plain,
    differentiate,
    make_case,
    options,
)

from teachercache.trainer.kl import topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize(("mode", "shape"), SHAPED_MODES)
def test_errs_no_more_than_plain_pytorch(mode: str, shape: str, bias: bool, dtype: torch.dtype) -> None:
    case = make_case(positions=33, vocab=523, width=61, k=9, samples=7, bias=bias)
    chosen = options(case, mode, shape)
    actual = case.run(dtype, **chosen, chunk_bytes=30_000)
    for name, value in actual.items():
        assert value.dtype == (torch.float32 if name == "loss" else dtype)
    assert_no_worse_than_plain(actual, case.plain(dtype, **chosen), case.truth(dtype, **chosen), TOLERANCE[dtype])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
@pytest.mark.parametrize("mode", MODES)
def test_large_logits_keep_their_digits_in_bf16(mode: str, device: str) -> None:
    # Rounded to bf16 before the softmax, logits of this size change gradients by several percent.
    case = make_case(positions=33, vocab=523, width=61, k=9, samples=7, bias=False, ragged=False, device=device)
    case = replace(case, weight=case.weight * 3)
    chosen = options(case, mode)
    actual, plain, truth = (run(torch.bfloat16, **chosen) for run in (case.run, case.plain, case.truth))
    for name in ("hidden", "weight"):
        expected = getattr(truth, name)
        ours, theirs = ((getattr(result, name).double() - expected).norm() for result in (actual, plain))
        assert ours < 4e-3 * expected.norm()
        assert theirs > 5 * ours


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_chunks_make_no_difference(mode: str, dtype: torch.dtype, backward: str) -> None:
    case = make_case(positions=23)
    chosen = options(case, mode, "capped", backward=backward)
    whole = case.run(dtype, **chosen)
    for chunk_bytes in (1, 3 * 61 * 8, 1 << 14):
        relative = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
        assert_close(case.run(dtype, **chosen, chunk_bytes=chunk_bytes), whole, relative=relative)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_upstream_gradient_scales_and_a_kept_graph_runs_again(mode: str, dtype: torch.dtype, backward: str) -> None:
    case = make_case()
    leaves = case.leaves(dtype)
    loss = topk_kl(*leaves[:2], case.rows, bias=leaves[2], **options(case, mode, backward=backward))
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [gradient.clone() for gradient in once]
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    scaled = torch.autograd.grad(-3.0 * loss, leaves)
    for first, copy, second, after in zip(once, kept, again, scaled, strict=True):
        # What a caller holds is never scaled in place.
        assert torch.equal(first, copy)
        assert torch.equal(second, copy)
        torch.testing.assert_close(after, -3.0 * copy)


@pytest.mark.parametrize(
    ("mode", "backward", "message"),
    [
        ("bucket", "in_forward", "gave its gradients to an earlier backward"),
        ("bucket", "recompute", "backward through the graph a second time"),
        ("renorm_both", None, "backward through the graph a second time"),
    ],
)
def test_a_graph_that_was_not_kept_is_refused_and_leaves_the_first_gradients_alone(
    mode: str, backward: str | None, message: str
) -> None:
    case = make_case()
    leaves = case.leaves(torch.float32)
    loss = topk_kl(*leaves[:2], case.rows, bias=leaves[2], **options(case, mode, backward=backward))
    first = torch.autograd.grad(loss, leaves)
    kept = [gradient.clone() for gradient in first]
    with pytest.raises(RuntimeError, match=message):
        loss.backward()
    for gradient, copy in zip(first, kept, strict=True):
        assert torch.equal(gradient, copy)


def test_gradients_that_backward_gave_grow_by_a_second_loss() -> None:
    # backward() hands over the tensors that the forward pass grew: they are the caller's own from then on.
    case = make_case()
    hidden, weight, bias = case.leaves(torch.float32)
    losses = [topk_kl(hidden, weight, case.rows, bias=bias) for _ in range(2)]
    (3.0 * losses[0]).backward()
    first = [leaf.grad.clone() for leaf in (hidden, weight, bias)]
    losses[1].backward()
    for leaf, gradient in zip((hidden, weight, bias), first, strict=True):
        torch.testing.assert_close(leaf.grad, gradient * 4 / 3)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
@pytest.mark.parametrize("way", [{}, {"backward": "recompute"}, {"tail": "renorm_both"}], ids=str)
def test_only_the_gradients_that_are_wanted_exist(wanted: tuple[bool, ...], way: dict[str, Any]) -> None:
    case = make_case()
    leaves = case.leaves(torch.float64)
    for leaf, wants in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(wants)
    actual = differentiate(topk_kl(*leaves[:2], case.rows, bias=leaves[2], **way), *leaves)
    expected = case.run(**way)
    for name, wants in zip(("hidden", "weight", "bias"), wanted, strict=True):
        gradient = getattr(actual, name)
        assert (gradient is not None) == wants
        if wants:
            torch.testing.assert_close(gradient, getattr(expected, name), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("way", [{}, {"backward": "recompute"}, {"tail": "renorm_both"}], ids=str)
def test_without_grad_the_loss_is_the_same(way: dict[str, Any]) -> None:
    case = make_case()
    with torch.no_grad():
        loss = topk_kl(*case.leaves(torch.float64)[:2], case.rows, bias=case.bias, **way)
    assert not loss.requires_grad
    assert torch.equal(loss, case.run(**way).loss)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(
    ("mode", "shape"), [*((mode, "plain") for mode in MODES), ("sampled", "mixed"), ("renorm", "t2")]
)
def test_unequal_micro_batches_are_one_batch(mode: str, shape: str, backward: str) -> None:
    case = make_case(positions=23)
    chosen = options(case, mode, shape, backward=backward) | {"labels": case.labels}
    expected = case.run(**chosen)
    hidden, weight, bias = case.leaves(torch.float64)
    total, counted = torch.zeros((), dtype=torch.float64), (case.labels != -100).sum()
    for part in (slice(0, 2), slice(2, 19), slice(19, 23)):
        chosen["labels"] = case.labels[part]
        loss = topk_kl(hidden[part], weight, case.rows.select(part), bias=bias, num_items=counted, **chosen)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, expected.loss)
    for actual, name in ((hidden, "hidden"), (weight, "weight"), (bias, "bias")):
        torch.testing.assert_close(actual.grad, getattr(expected, name), rtol=1e-12, atol=1e-15)


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


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("mode", MODES)
def test_autocast_rounds_the_operands_and_nothing_else(mode: str, backward: str, inside: bool) -> None:
    case = make_case(positions=33, vocab=523, width=61)
    chosen = options(case, mode, backward=backward)
    leaves = case.leaves(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = topk_kl(*leaves[:2], case.rows, bias=leaves[2], **chosen)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    actual = Result(loss.detach(), *(leaf.grad for leaf in leaves))
    rounded = case.rounded(torch.bfloat16)
    # The bias is added to float32 logits, so autocast leaves it alone.
    exact = Case(rounded.hidden, rounded.weight, case.bias, case.rows, case.labels, case.teacher_logits)
    assert_close(actual, exact.run(torch.float32, **chosen), relative=1e-6)
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
