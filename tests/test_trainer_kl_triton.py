"""The Triton kernels, in Triton's interpreter where there is no GPU: the same tests run for real where there is one.

Shapes: C positions, V vocabulary.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_kl_cases import (
    FULL_MODES,
    SHAPED_MODES,
    TOLERANCE,
    Case,
    assert_close,
    assert_no_worse_than_plain,
    differentiate,
    from_logits,
    log32,
    make_case,
    normal,
    options,
    rows_of,
)
from torch import Tensor

from teachercache.trainer.kl import topk_kl, triton_chunks
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
    return make_case(**{"positions": 3, "vocab": 61, "width": 7, "k": 5, "samples": 3} | sizes, device=device)


def check_against_plain(device: str, dtype: torch.dtype, mode: str, shape: str, **how: Any) -> None:
    """The kernels' loss and gradients err no more than plain PyTorch's."""
    # A bias is added after logits are rounded, which plain PyTorch does before: other errors, as large.
    bias = shape != "plain" and how.get("logits_dtype") is None
    positions = 3 if device == "cpu" else 301
    case = small(device, bias=bias) if device == "cpu" else make_case(301, 5003, 203, 17, 9, bias=bias, device=device)
    # Chunks, the last of them smaller.
    chunk_bytes = -(-positions // 2) * len(case.weight) * 4
    chosen = options(case, mode, shape)
    actual = case.run(dtype, impl="triton", chunk_bytes=chunk_bytes, **chosen, **how)
    # The largest of a few errors says little.
    tolerance = TOLERANCE[dtype] * (3 if device == "cpu" else 1)
    assert_no_worse_than_plain(actual, case.plain(dtype, **chosen), case.truth(dtype, **chosen), tolerance)


@on_each_device
@pytest.mark.parametrize(("mode", "shape"), KERNEL_MODES)
def test_errs_no_more_than_plain_pytorch(mode: str, shape: str, device: str) -> None:
    check_against_plain(device, torch.float32, mode, shape)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_errs_no_more_in_narrow_dtypes(narrow: bool, dtype: torch.dtype, device: str) -> None:
    for mode in ("sampled",) if device == "cpu" else FULL_MODES:
        for shape in ("plain", "everything") if mode != "renorm" else ("plain", "t2"):
            check_against_plain(device, dtype, mode, shape, logits_dtype=dtype if narrow else None)


@on_each_device
@pytest.mark.parametrize(("mode", "reduction"), [("sampled", "mean"), ("jsd-bucket", "none"), ("to_label", "none")])
def test_recomputes(mode: str, reduction: str, device: str) -> None:
    case = small(device)
    leaves = case.leaves(torch.float32)
    upstream = torch.tensor([0.5, -2.0, 0.0] if reduction == "none" else -3.0)
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
    case = small(device, positions=4)
    weights = torch.tensor([0.5, 3.0, 0.0, 2.0], device=device)
    for labels in (None, case.labels.clamp(min=0)) if mode == "sampled" else (case.labels.clamp(min=0),):
        chosen = options(case, mode, "capped", position_weight=weights, return_stats=True, bias=case.bias)
        chosen["labels"] = labels
        _, actual = topk_kl(case.hidden.float(), case.weight.float(), case.rows, impl="triton", **chosen)
        _, expected = topk_kl(case.hidden, case.weight, case.rows, impl="reference", **chosen)
        for name, value in vars(expected).items():
            got = getattr(actual, name).double()
            assert value.isnan() == (name == "ce" and labels is None)
            torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6, equal_nan=True)


@on_each_device
@pytest.mark.parametrize(("mode", "shape"), [("sampled", "everything"), ("bucket", "plain"), ("jsd-bucket", "capped")])
def test_parts_of_a_vocabulary_add_up(mode: str, shape: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Programs that share a position wait for one another, which the interpreter cannot: without a gradient none does.
    monkeypatch.setattr(triton_chunks, "INTERPRETED", False)
    monkeypatch.setattr(triton_chunks, "BLOCK", 16)
    monkeypatch.setattr(triton_chunks, "PARTS", 4)
    monkeypatch.setattr("teachercache.trainer.kl.loss._why_not_triton", lambda *_: None)
    # Five parts: one has closed columns only, one a support entry only, the last a single column.
    rows = rows_of([[3, 40], [64, 0]], [[0.5, 0.25], [0.5, 0.3]], [log32(0.25), log32(0.2)], [[5, 33], [50, 50]])
    bias = torch.zeros(65).index_fill(0, torch.arange(16, 32), -torch.inf).double()
    bias[32:48] = torch.where(torch.arange(32, 48) == 40, 0.0, -60.0)
    case = Case(normal(2, 65), torch.eye(65).double(), bias, rows, torch.tensor([60, 3]), normal(2, 65)).to(device)
    chosen = options(case, mode, shape)
    leaves = case.leaves(torch.float32)
    with torch.set_grad_enabled(device == "cuda"):
        loss, stats = topk_kl(*leaves[:2], case.rows, bias=leaves[2], impl="triton", return_stats=True, **chosen)
    exact = case.leaves(torch.float64)
    truth, expected = topk_kl(*exact[:2], case.rows, bias=exact[2], impl="reference", return_stats=True, **chosen)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats.student_entropy.double(), expected.student_entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.top1_agreement.double(), expected.top1_agreement)
    if device == "cuda":
        assert_close(differentiate(loss, *leaves), differentiate(truth, *exact), relative=1e-6)


class Chunk:
    """Logits in `dtype`, in memory that is NaN beyond them, and where the kernels leave the gradient."""

    def __init__(self, logits_CV: Tensor, dtype: torch.dtype, gradient: torch.dtype) -> None:
        rows, vocab_size = logits_CV.shape
        memory = torch.full((rows, -(-vocab_size // 16) * 16), torch.nan, dtype=dtype, device=logits_CV.device)
        self.logits_CV, self.gradient_CV = memory[:, :vocab_size], memory.view(gradient)[:, :vocab_size]
        self.logits_CV.copy_(logits_CV)

    def judge(self, packed: PackedPositions) -> tuple[Tensor, Tensor]:
        scale, rows = torch.tensor(0.25, device=self.logits_CV.device), len(packed)
        same_memory = self.logits_CV.dtype == self.gradient_CV.dtype
        chunks = TritonChunks(packed, scale, rows, same_memory=same_memory, has_teacher=True, with_stats=False)
        weight_C = packed.weight_R.float()
        result = chunks.judge(self.logits_CV, self.gradient_CV, None, slice(0, rows), weight_C, gradient=True)
        assert result.gradient_CV is self.gradient_CV
        assert not chunks.broken_R.any()
        return result.loss_C, self.gradient_CV


@on_each_device
@pytest.mark.parametrize(
    ("dtype", "gradient"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", FULL_MODES)
def test_narrow_logits_are_read_and_narrow_gradients_written_in_place(
    mode: str, dtype: torch.dtype, gradient: torch.dtype, device: str
) -> None:
    case = small(device, positions=2, vocab=301)
    chosen = options(case, mode, "everything")
    labels = chosen.pop("labels").clamp(min=0)
    weights = torch.tensor([2.0, 0.5], device=device, dtype=torch.float64)
    objective = Objective(**chosen)
    packed = pack(case.rows, weights, labels, ignore_index=-100, objective=objective, dtype=torch.float64)
    logits_CV = (case.hidden @ case.weight.t())[packed.positions_R].to(dtype)
    loss_C, gradient_CV = Chunk(logits_CV, dtype, gradient).judge(packed)
    part = packed.part(slice(0, len(packed)))
    exact = judge_chunk(logits_CV.double(), None, part, part.weight_C * 0.25, with_stats=False, shard=None)
    torch.testing.assert_close(loss_C.double(), exact.loss_C, rtol=1e-5, atol=1e-5)
    assert exact.gradient_CV is not None
    torch.testing.assert_close(gradient_CV.double(), exact.gradient_CV, rtol=torch.finfo(gradient).eps, atol=1e-6)


@on_each_device
def test_softcap_is_exact_from_the_smallest_to_the_largest_logits(device: str) -> None:
    case = small(device, positions=2, vocab=30, bias=False)
    for size, cap in ((1e-4, 30.0), (1.0, 1e4), (30.0, 30.0), (1e4, 30.0)):
        logits = normal(2, 30).mul(size).float().double().to(device)
        loss, gradient = from_logits(logits, case.rows, torch.float32, softcap=cap, impl="triton")
        truth, expected = from_logits(logits, case.rows, torch.float64, softcap=cap, impl="reference")
        torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@on_each_device
@pytest.mark.parametrize(("mode", "shape"), [("sampled", "everything"), ("jsd-bucket", "capped")])
def test_every_element_is_written(mode: str, shape: str, device: str) -> None:
    case = small(device, positions=3)
    assert torch.empty(5, device=device).isnan().all()
    leaves = case.leaves(torch.float32)
    chosen = options(case, mode, shape, return_stats=True)
    loss, stats = topk_kl(*leaves[:2], case.rows, bias=leaves[2], impl="triton", **chosen)
    result = differentiate(loss, *leaves)
    for value in (*vars(result).values(), stats.student_entropy, stats.kl, stats.top1_agreement):
        assert torch.isfinite(value).all()


@on_each_device
@pytest.mark.parametrize("factor", [1.0, -2.5])
@pytest.mark.parametrize("out", [None, torch.float32, torch.bfloat16], ids=str)
def test_scaled_writes_every_element(factor: float, out: torch.dtype | None, device: str) -> None:
    numbers = normal(83, 101).float().to(device)
    expected = (numbers * factor).to(out or torch.float32)
    into = numbers if out is None else torch.full_like(numbers, torch.nan, dtype=out)
    result = scaled(numbers, torch.tensor(factor, device=device), into)
    assert result is into
    # The interpreter cuts float32 off where a GPU rounds it to bf16.
    torch.testing.assert_close(result, expected, rtol=torch.finfo(result.dtype).eps, atol=0.0)


def test_compiles_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py")],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.strip() == "{'take_out': 4, 'sweep': 4, 'judge': 4, 'multiply': 2}", ran.stderr
