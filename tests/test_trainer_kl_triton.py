"""The Triton kernels, in Triton's interpreter where there is no GPU: the same tests run for real where there is one.

Shapes: C positions, V vocabulary.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_trainer_kl_cases import (
    FULL_MODES,
    SHAPED_MODES,
    TOLERANCE,
    Case,
    Result,
    arguments,
    assert_close,
    assert_no_worse_than_plain,
    from_logits,
    make_case,
    options,
    rows_of,
)
from test_trainer_kl_refusals import BROKEN, CASE, LABELS
from torch import Tensor

from teachercache.trainer.kl import TeacherRows, topk_kl, triton_chunks
from teachercache.trainer.kl.chunk import judge_chunk
from teachercache.trainer.kl.objective import Objective
from teachercache.trainer.kl.packing import PackedPositions, pack
from teachercache.trainer.kl.triton_chunks import INTERPRETED, TritonChunks, scaled

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # numpy speaks for kernels there, about the infinities that they are written for.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")]),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)
KERNEL_MODES = [(mode, shape) for mode, shape in SHAPED_MODES if mode in FULL_MODES]


def small(device: str, **sizes: Any) -> Case:
    """Few positions, as the interpreter takes its time for each, and a vocabulary that nothing divides."""
    return make_case(**{"positions": 5, "vocab": 61, "width": 7, "k": 5, "samples": 3} | sizes, device=device)


def check(case: Case, dtype: torch.dtype, chosen: dict[str, Any], **how: Any) -> Result:
    """The kernels' loss and gradients, which err no more than plain PyTorch's."""
    actual = case.run(dtype, impl="triton", **chosen, **how)
    assert_no_worse_than_plain(actual, case.plain(dtype, **chosen), case.truth(dtype, **chosen), TOLERANCE[dtype])
    return actual


@on_each_device
@pytest.mark.parametrize(("mode", "shape"), KERNEL_MODES)
def test_errs_no_more_than_plain_pytorch(mode: str, shape: str, device: str) -> None:
    case = small(device, bias=shape != "plain")
    # Two chunks, the second of them smaller.
    check(case, torch.float32, options(case, mode, shape), chunk_bytes=3 * 61 * 4)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("mode", FULL_MODES)
def test_errs_no_more_in_narrow_dtypes(mode: str, narrow: bool, dtype: torch.dtype, device: str) -> None:
    case = small(device, positions=3)
    check(case, dtype, options(case, mode), logits_dtype=dtype if narrow else None)


@on_each_device
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mode", FULL_MODES)
def test_recomputes(mode: str, reduction: str, device: str) -> None:
    case = small(device, positions=4)
    leaves = case.leaves(torch.float32)
    upstream = torch.tensor([0.5, -2.0, 0.0, 1.0], device=device) if reduction == "none" else torch.tensor(-3.0)
    chosen = options(case, mode, "capped", reduction=reduction, backward="recompute", bias=leaves[2])
    loss = topk_kl(*leaves[:2], case.rows, impl="triton", **chosen)
    gradients = torch.autograd.grad((loss * upstream.to(device)).sum(), leaves)
    exact = case.leaves(torch.float64)
    truth = topk_kl(*exact[:2], case.rows, impl="reference", **chosen | {"bias": exact[2]})
    expected = torch.autograd.grad((truth * upstream.to(device)).sum(), exact)
    for actual, wanted in zip((loss, *gradients), (truth, *expected), strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=2e-5, atol=2e-6)


@on_each_device
@pytest.mark.parametrize("mode", FULL_MODES)
def test_stats_are_those_of_the_definition(mode: str, device: str) -> None:
    case = small(device)
    weights = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0], device=device)
    for shape in ("plain", "everything"):
        chosen = options(case, mode, shape, position_weight=weights, return_stats=True, bias=case.bias)
        _, actual = topk_kl(case.hidden.float(), case.weight.float(), case.rows, impl="triton", **chosen)
        _, expected = topk_kl(case.hidden, case.weight, case.rows, impl="reference", **chosen)
        for name, value in vars(expected).items():
            got = getattr(actual, name).double()
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@on_each_device
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(("mode", "shape"), [("sampled", "everything"), ("bucket", "plain"), ("jsd-bucket", "capped")])
def test_parts_of_a_vocabulary_add_up(
    mode: str, shape: str, block: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Programs that share a position wait for one another, which the interpreter cannot: without a gradient none does.
    monkeypatch.setattr(triton_chunks, "INTERPRETED", False)
    monkeypatch.setattr(triton_chunks, "BLOCK", block)
    case = small(device)
    # The last part has a column or two, and one has nothing but closed columns.
    bias = case.bias.index_fill(0, torch.arange(block, 2 * block, device=device).clamp(max=60), -torch.inf)
    case = replace(case, bias=bias, rows=in_columns(case.rows, block))
    chosen = options(case, mode, shape)
    leaves = case.leaves(torch.float32)
    monkeypatch.setattr("teachercache.trainer.kl.loss._why_not_triton", lambda *_: None)
    with torch.set_grad_enabled(device == "cuda"):
        loss, stats = topk_kl(*leaves[:2], case.rows, bias=leaves[2], impl="triton", return_stats=True, **chosen)
    truth, expected = topk_kl(
        case.hidden, case.weight, case.rows, bias=bias, impl="reference", return_stats=True, **chosen
    )
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats.student_entropy.double(), expected.student_entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.top1_agreement.double(), expected.top1_agreement)
    if device == "cuda":
        check(case, torch.float32, chosen)


def in_columns(rows: TeacherRows, block: int) -> TeacherRows:
    """The rows with ids of the second block moved into the first."""
    moved = [torch.where((ids >= block) & (ids < 2 * block), ids * 0 - 1, ids) for ids in (rows.token_ids_PK,)]
    draws = rows.tail_token_ids_PN
    draws = torch.where((draws >= block) & (draws < 2 * block), draws * 0 + 60, draws)
    logprobs = torch.where(moved[0] < 0, -torch.inf, rows.logprobs_PK)
    log_tail = torch.log1p(-logprobs.exp().sum(1))
    moved[0][:, 0] = torch.where((moved[0] < 0).all(1), 0, moved[0][:, 0])
    return replace(rows, token_ids_PK=moved[0], logprobs_PK=logprobs, log_tail_mass_P=log_tail, tail_token_ids_PN=draws)
