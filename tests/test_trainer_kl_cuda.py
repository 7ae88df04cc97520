"""The fused loss on a GPU: narrow operands into float32 results, and the memory that README claims."""

from __future__ import annotations

import pytest
import torch
from test_trainer_kl_cases import TAILS, Case, make_case
from test_trainer_kl_gradients import TOLERANCE, assert_no_worse_than_plain, options

from teachercache.trainer.kl import TeacherRows, topk_kl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("ce_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", TAILS)
def test_errs_no_more_than_plain_pytorch(tail: str, ce_weight: float, dtype: torch.dtype) -> None:
    case = make_case(positions=301, vocab=5003, width=203, k=17, samples=9, device="cuda")
    mode = options(case, tail, ce_weight)
    actual = case.run(dtype, **mode, chunk_bytes=1 << 20)
    assert_no_worse_than_plain(actual, case.plain(dtype, **mode), case.truth(dtype, **mode), TOLERANCE[dtype])


@pytest.mark.parametrize("tail", TAILS)
def test_autocast(tail: str) -> None:
    case = make_case(positions=64, vocab=523, width=64, bias=False, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        actual = case.run(torch.float32, tail=tail)
    exact = case.truth(torch.bfloat16, tail=tail)
    for name, value in actual.items():
        assert value.dtype == torch.float32
        expected = getattr(exact, name)
        assert (value - expected).norm() <= 3e-3 * expected.norm()


def big_case(positions: int, vocab: int, width: int, k: int) -> tuple[torch.Tensor, torch.Tensor, TeacherRows]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(positions, width, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, width, generator=generator, device="cuda", dtype=torch.bfloat16) * 2 / width**0.5
    logprobs = torch.randn(positions, 2 * k, generator=generator, device="cuda").mul(3).log_softmax(1)[:, :k]
    ids = torch.randint(vocab - k, (positions, 1), generator=generator, device="cuda") + torch.arange(k, device="cuda")
    log_tail = torch.log1p(-logprobs.exp().sum(1))
    return hidden.requires_grad_(), weight.requires_grad_(), TeacherRows(ids, logprobs, log_tail)


@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_peak_memory_is_what_readme_says(head: str) -> None:
    positions, vocab, width, chunk_bytes = 8192, 50_257, 512, 64 << 20
    hidden, weight, rows = big_case(positions, vocab, width, k=16)
    weight.requires_grad_(head == "trained")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = topk_kl(hidden, weight, rows, chunk_bytes=chunk_bytes)
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
