"""The fused loss on a GPU: narrow operands into float32 results, and the memory that README claims.

The kernels' own tests are in test_trainer_kl_triton.py, and run there too.
"""

from __future__ import annotations

import pytest
import torch
from test_trainer_kl_cases import (
    MODES,
    SHAPED_MODES,
    TOLERANCE,
    Case,
    assert_no_worse_than_plain,
    differentiate,
    make_case,
    options,
)

from teachercache.trainer.kl import TeacherRows, topk_kl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("mode", "shape"), SHAPED_MODES)
def test_errs_no_more_than_plain_pytorch(mode: str, shape: str, dtype: torch.dtype) -> None:
    case = make_case(positions=301, vocab=5003, width=203, k=17, samples=9, device="cuda")
    chosen = options(case, mode, shape)
    actual = case.run(dtype, **chosen, impl="torch", chunk_bytes=1 << 20)
    assert_no_worse_than_plain(actual, case.plain(dtype, **chosen), case.truth(dtype, **chosen), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [(), ("accumulator_dtype",), ("accumulator_dtype", "logits_dtype")], ids=str)
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_errs_no_more_where_sums_over_the_vocabulary_are_split(
    backward: str, own: tuple[str, ...], dtype: torch.dtype
) -> None:
    # Few tiles for many cores, and a vocabulary that four parts divide.
    case = make_case(positions=1500, vocab=4096, width=256, k=16, samples=8, bias=False, device="cuda")
    how = {"backward": backward, "chunk_bytes": 256 * 4096 * 4} | dict.fromkeys(own, dtype)
    actual = case.run(dtype, tail="bucket", **how)
    # Sums that are kept in the operands' dtype are rounded once a chunk or part.
    tolerance = TOLERANCE[dtype] * (4 if own else 1)
    plain, truth = case.plain(dtype, tail="bucket"), case.truth(dtype, tail="bucket")
    assert_no_worse_than_plain(actual, plain, truth, tolerance)


def test_a_head_that_is_a_view_of_another() -> None:
    case = make_case(positions=1500, vocab=4096, width=256, bias=False, device="cuda")
    hidden, weight = case.hidden.bfloat16(), case.weight.bfloat16()
    loss = topk_kl(hidden.requires_grad_(), weight.t().contiguous().t().requires_grad_(), case.rows)
    expected = topk_kl(hidden, weight, case.rows)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode: str, backward: str) -> None:
    case = make_case(positions=64, vocab=523, width=64, bias=False, device="cuda")
    leaves = case.leaves(torch.float32)
    chosen = options(case, mode, backward=backward)
    with torch.autocast("cuda", torch.bfloat16):
        loss = topk_kl(*leaves[:2], case.rows, **chosen)
    actual = differentiate(loss, *leaves)
    exact = case.truth(torch.bfloat16, **chosen)
    for name, value in actual.items():
        assert value.dtype == torch.float32
        expected = getattr(exact, name)
        assert (value - expected).norm() <= 3e-3 * expected.norm()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_kept_graph_gives_the_same_gradients_again(dtype: torch.dtype) -> None:
    case = make_case(positions=64, vocab=523, width=64, device="cuda")
    leaves = case.leaves(dtype)
    loss = topk_kl(*leaves[:2], case.rows, bias=leaves[2])
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    for upstream in (1.0, 1.0, -2.0):
        again = torch.autograd.grad(loss * upstream, leaves, retain_graph=True)
        for gradient, copy, kept in zip(again, copies, first, strict=True):
            torch.testing.assert_close(gradient, copy * upstream)
            assert torch.equal(kept, copy)


def big_case(positions: int, vocab: int, width: int, k: int) -> tuple[torch.Tensor, torch.Tensor, TeacherRows]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(positions, width, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, width, generator=generator, device="cuda", dtype=torch.bfloat16) * 2 / width**0.5
    logprobs = torch.randn(positions, 2 * k, generator=generator, device="cuda").mul(3).log_softmax(1)[:, :k]
    ids = torch.randint(vocab - k, (positions, 1), generator=generator, device="cuda") + torch.arange(k, device="cuda")
    log_tail = torch.log1p(-logprobs.exp().sum(1))
    return hidden.requires_grad_(), weight.requires_grad_(), TeacherRows(ids, logprobs, log_tail)


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_peak_memory_is_what_readme_says(head: str, impl: str) -> None:
    positions, vocab, width, chunk_bytes = 8192, 50_257, 512, 64 << 20
    hidden, weight, rows = big_case(positions, vocab, width, k=16)
    weight.requires_grad_(head == "trained")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = topk_kl(hidden, weight, rows, chunk_bytes=chunk_bytes, impl=impl)
    kept = positions * width * 2 + (vocab * width * 4 if head == "trained" else 0)
    # Beside the [C, V] buffers a chunk has some columns per position; the rows' checks some int64 per entry.
    small = positions * 16 * 8 * 8
    assert torch.cuda.max_memory_allocated() - before <= kept + chunk_bytes + small
    loss.backward()
    result = positions * width * 2 + (vocab * width * 2 if head == "trained" else 0)
    assert torch.cuda.max_memory_allocated() - before <= kept + max(chunk_bytes, result) + small
    # One bf16 [P, V] tensor alone would be larger than all of it.
    assert positions * vocab * 2 > kept + chunk_bytes + result + small


def test_rows_follow_the_student_s_device() -> None:
    case = make_case(device="cuda")
    with pytest.raises(ValueError, match="rows is on cpu, but hidden on cuda"):
        topk_kl(case.hidden, case.weight, case.rows.to("cpu"))
    moved = Case(case.hidden, case.weight, case.bias, case.rows.to("cpu").to("cuda"), case.labels, case.teacher_logits)
    assert torch.equal(moved.run().loss, case.run().loss)
