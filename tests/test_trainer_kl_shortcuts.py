"""The ways to save memory and work: gradients written where the optimizer reads them, and small ones left out.

Shapes: S columns that are not skipped, C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_trainer_kl_cases import Case, Result, assert_close, make_case, make_rows, normal, options
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teachercache.trainer.kl import topk_kl
from teachercache.trainer.kl.gradients import Gradients

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = make_case()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("skip_small", [0.0, 1e-3])
@pytest.mark.parametrize("factor", [1.0, 0.1, 1 / 3])
def test_a_direct_gradient_is_the_ordinary_one(factor: float, skip_small: float, dtype: torch.dtype) -> None:
    """Two micro-batches and one that masks positions add up, whatever was there before."""
    chosen = options(CASE, "sampled", ce_weight=0.3, chunk_bytes=1000, num_items=20, skip_small=skip_small)

    def run(direct: bool, *, started: bool) -> Result:
        hidden, weight, bias = CASE.leaves(dtype)
        assert weight.grad is None
        if started:
            weight.grad = torch.ones_like(weight)
        for _ in range(2):
            more = {"grad_scale": factor} if direct else {}
            loss = topk_kl(hidden, weight, CASE.rows, bias=bias, **chosen, **more)
            (loss * factor).backward()
        assert bias is not None
        return Result(loss.detach(), hidden.grad, weight.grad, bias.grad)

    for started in (False, True):
        relative = 1e-13 if dtype == torch.float64 else 1e-6
        assert_close(run(True, started=started), run(False, started=started), relative=relative)


def test_a_direct_gradient_lies_there_after_forward_and_is_the_same_memory() -> None:
    hidden, weight, _ = CASE.leaves(torch.float64)
    weight.grad = torch.zeros_like(weight)
    memory = weight.grad.data_ptr()
    loss = topk_kl(hidden, weight, CASE.rows, grad_scale=1.0)
    written = weight.grad.clone()
    assert written.any()
    loss.backward()
    assert weight.grad.data_ptr() == memory
    assert torch.equal(weight.grad, written)
    with torch.no_grad():
        topk_kl(hidden, weight, CASE.rows, grad_scale=1.0)
    assert torch.equal(weight.grad, written)


def test_another_upstream_gradient_than_was_said_is_refused() -> None:
    hidden, weight, _ = CASE.leaves(torch.float64)
    loss = topk_kl(hidden, weight, CASE.rows, grad_scale=0.5)
    with pytest.raises(RuntimeError, match=r"upstream gradient of 0\.5, but backward brought 1\.0"):
        loss.backward()


def test_a_direct_gradient_is_for_one_backward_pass() -> None:
    hidden, weight, _ = CASE.leaves(torch.float64)
    loss = topk_kl(hidden, weight, CASE.rows, grad_scale=1.0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="grad_scale is for one backward pass"):
        loss.backward()


def test_a_direct_gradient_of_a_tied_embedding_meets_the_other() -> None:
    tokens, found = torch.arange(len(CASE.hidden)) % 5, []
    for more in ({}, {"grad_scale": 1.0}):
        _, weight, _ = CASE.leaves(torch.float64)
        topk_kl(weight[tokens] * 1.5, weight, CASE.rows, **more).backward()
        found.append(weight.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_direct_gradient_under_checkpointing_is_written_once(reentrant: bool) -> None:
    found = []
    for more in ({}, {"grad_scale": 1.0}):
        hidden, weight, _ = CASE.leaves(torch.float64)

        def whole(x: Tensor, weight: Tensor = weight, more: dict[str, Any] = more) -> Tensor:
            return topk_kl(x.tanh(), weight, CASE.rows, **more)

        checkpoint(whole, hidden, use_reentrant=reentrant).backward()
        found.append((hidden.grad, weight.grad))
    torch.testing.assert_close(found[1], found[0])


def test_a_frozen_head_has_no_direct_gradient() -> None:
    hidden, weight, _ = CASE.leaves(torch.float64)
    topk_kl(hidden, weight.requires_grad_(False), CASE.rows, grad_scale=1.0).backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"backward": "recompute"}, "grad_scale needs the gradient in forward"),
        ({"reduction": "none"}, "grad_scale needs the gradient in forward"),
        ({"grad_scale": 0.0}, "grad_scale must be finite and positive, got 0.0"),
        ({"grad_scale": float("inf")}, "grad_scale must be finite and positive, got inf"),
    ],
    ids=str,
)
def test_a_direct_gradient_that_cannot_be_right_is_refused(chosen: dict[str, Any], message: str) -> None:
    hidden, weight, _ = CASE.leaves(torch.float64)
    with pytest.raises(ValueError, match=message):
        topk_kl(hidden, weight, CASE.rows, **{"grad_scale": 1.0, **chosen})
    assert weight.grad is None


def test_a_direct_gradient_wants_a_leaf_and_no_float16() -> None:
    hidden, weight, _ = CASE.leaves(torch.float64)
    with pytest.raises(ValueError, match="needs a weight that is a leaf"):
        topk_kl(hidden, weight * 2, CASE.rows, grad_scale=1.0)
    hidden, weight, _ = CASE.leaves(torch.float16)
    with pytest.raises(ValueError, match="float16 is trained under a GradScaler"):
        topk_kl(hidden, weight, CASE.rows, grad_scale=1.0)


@pytest.mark.parametrize(("body", "head"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], ids=str)
def test_a_direct_gradient_is_summed_in_what_a_gemm_can_give(body: torch.dtype, head: torch.dtype) -> None:
    """Off a GPU no GEMM rounds its result to a narrower dtype."""
    hidden, weight, _ = CASE.leaves(head)
    with pytest.raises(ValueError, match=r"which is torch\.bfloat16: on cpu"):
        topk_kl(hidden.to(body), weight, CASE.rows, grad_scale=1.0)
    assert weight.grad is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, weight, _ = CASE.leaves(torch.float32)
        loss = topk_kl(hidden, weight, CASE.rows, grad_scale=1.0)
    loss.backward()
    twin = CASE.leaves(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = topk_kl(twin[0], twin[1], CASE.rows)
    loss.backward()
    torch.testing.assert_close(weight.grad, twin[1].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_off_a_gpu_are_wide_whatever_is_asked_for(dtype: torch.dtype) -> None:
    wide, narrow = (CASE.run(dtype, chunk_bytes=1000, accumulator_dtype=asked) for asked in (None, dtype))
    for name, value in wide.items():
        assert torch.equal(getattr(narrow, name), value), name


def skipping(case: Case, epsilon: float, dtype: torch.dtype = torch.float64, **more: Any) -> Result:
    return case.run(dtype, tail="bucket", skip_small=epsilon, chunk_bytes=1000, reduction="sum", **more)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 1e-2, 0.1])
def test_what_is_skipped_is_bounded(epsilon: float, backward: Any) -> None:
    """A chunk's column that is left out has no entry as large as epsilon: README, section 5."""
    case = make_case(positions=40, seed=3)
    exact, actual = (skipping(case, value, backward=backward) for value in (0.0, epsilon))
    assert torch.equal(actual.loss, exact.loss)
    assert exact.hidden is not None and exact.weight is not None
    assert actual.hidden is not None and actual.weight is not None
    assert torch.equal(actual.bias, exact.bias)  # type: ignore[arg-type]
    # Of a position, and of a column: what all left-out entries add up to at worst.
    of_position = epsilon * case.weight.norm(dim=1).sum()
    of_column = epsilon * case.hidden.norm(dim=1).sum()
    assert ((actual.hidden - exact.hidden).norm(dim=1) <= of_position).all()
    assert ((actual.weight - exact.weight).norm(dim=1) <= of_column).all()
    assert torch.equal(actual.weight, exact.weight) == (epsilon == 0.0)


@pytest.mark.parametrize("scale", ["num_items", "upstream"])
def test_what_is_small_is_said_before_normalisation(scale: str) -> None:
    case = make_case(positions=40, seed=3)
    expected, found = skipping(case, 1e-2), []
    for backward in ("in_forward", "recompute"):
        hidden, weight, bias = case.leaves(torch.float64)
        more: dict[str, Any] = {"num_items": 512} if scale == "num_items" else {"reduction": "sum"}
        loss = topk_kl(
            hidden, weight, case.rows, bias=bias, tail="bucket", skip_small=1e-2, chunk_bytes=1000, backward=backward,
            **more,
        )  # fmt: skip
        (loss if scale == "num_items" else loss / 512).backward()
        assert weight.grad is not None
        found.append(weight.grad * 512)
    for gradient in found:
        torch.testing.assert_close(gradient, expected.weight)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_all_may_be_skipped(backward: Any, labelled: bool, dtype: torch.dtype) -> None:
    more = {"labels": CASE.labels} if labelled else {}
    found = skipping(CASE, 10.0, dtype, backward=backward, **more)
    assert found.hidden is not None and found.weight is not None and found.bias is not None
    assert not found.hidden.any()
    assert not found.weight.any()
    assert found.bias.any()


def zipf_case(positions: int = 256, vocab: int = 5000) -> Case:
    """A teacher by Zipf's law whose tail holds 4 percent, and a student that sees its context through noise."""
    log_frequency = -1.2 * torch.arange(1, vocab + 1).double().log()
    context, tokens = 6 * normal(positions, 64, seed=1), normal(vocab, 64, seed=2) / 8
    logits = log_frequency + context @ tokens.t()
    u = torch.rand(positions, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows = make_rows(logits, torch.full((positions,), 16), 16, 16, u)
    hidden = torch.cat([context + 1.2 * normal(positions, 64, seed=3), torch.ones(positions, 1)], dim=1)
    weight = torch.cat([tokens, log_frequency[:, None]], dim=1)
    return Case(hidden, weight, None, rows, torch.zeros(positions).long(), logits)


@pytest.mark.parametrize(("tail", "share"), [("bucket", 0.04), ("sampled", 0.015)])
def test_what_is_skipped_of_a_long_tail_is_not_missed(tail: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kept = zipf_case(), []
    real = Gradients._significant

    def significant(self: Gradients, gradient_CV: Tensor) -> Tensor | None:
        columns_S = real(self, gradient_CV)
        kept.append(gradient_CV.shape[1] if columns_S is None else len(columns_S))
        return columns_S

    monkeypatch.setattr(Gradients, "_significant", significant)
    exact, actual = (case.run(tail=tail, skip_small=epsilon) for epsilon in (0.0, 1e-5))
    assert kept[0] == 5000
    # Few: of 256 positions, one that finds a token likely is enough to keep it.
    assert kept[1] <= (1 - share) * 5000
    assert exact.hidden is not None and exact.weight is not None
    assert 0 < (actual.hidden - exact.hidden).norm() < 3e-4 * exact.hidden.norm()
    assert 0 < (actual.weight - exact.weight).norm() < 3e-5 * exact.weight.norm()
