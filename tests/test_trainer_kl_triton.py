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
    differentiate,
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
    return make_case(**{"positions": 3, "vocab": 61, "width": 7, "k": 5, "samples": 3} | sizes, device=device)


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
    check(case, torch.float32, options(case, mode, shape), chunk_bytes=2 * 61 * 4)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_errs_no_more_in_narrow_dtypes(narrow: bool, dtype: torch.dtype, device: str) -> None:
    for mode in ("sampled",) if device == "cpu" else FULL_MODES:
        case = small(device) if device == "cpu" else make_case(301, 5003, 203, k=17, samples=9, device=device)
        check(case, dtype, options(case, mode), logits_dtype=dtype if narrow else None, chunk_bytes=1 << 20)


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
    case = small(device, positions=3, vocab=301)
    chosen = options(case, mode, "everything")
    labels = chosen.pop("labels")
    weights = torch.tensor([2.0, 0.5, 1.0], device=device, dtype=torch.float64)
    objective = Objective(**chosen)
    packed = pack(case.rows, weights, labels, ignore_index=-100, objective=objective, dtype=torch.float64)
    assert len(packed) > 1
    logits_CV = (case.hidden @ case.weight.t())[packed.positions_R].to(dtype)
    loss_C, gradient_CV = Chunk(logits_CV, dtype, gradient).judge(packed)
    part = packed.part(slice(0, len(packed)))
    exact = judge_chunk(logits_CV.double(), None, part, part.weight_C * 0.25, with_stats=False, shard=None)
    torch.testing.assert_close(loss_C.double(), exact.loss_C, rtol=1e-5, atol=1e-5)
    assert exact.gradient_CV is not None
    torch.testing.assert_close(gradient_CV.double(), exact.gradient_CV, rtol=torch.finfo(gradient).eps, atol=1e-6)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log32(value: float) -> float:
    return float(torch.tensor(value).log())


ODD_ROWS = {
    "equal draws": rows_of([[1]] * 3, [[0.5]] * 3, [log32(0.5)] * 3, [[4, 4, 4, 7], [4, 7, 4, 7], [7, 7, 7, 7]]),
    "ragged draws": rows_of([[1]] * 3, [[0.5]] * 3, [log32(0.5)] * 3, [[4, 3, -1, -1], [-1, 7, -1, -1], [7, 7, 7, 7]]),
    "no support": rows_of([[-1]] * 3, [[0.0]] * 3, [0.0] * 3, [[4, 4, 0], [8, 1, 2], [3, 3, 3]]),
    "no tail": rows_of([[1, 0]] * 3, [[0.5, 0.5]] * 3, [-torch.inf] * 3, [[-1, -1]] * 3),
    "tiny tail": rows_of([[1, 0]] * 3, [[0.5, 0.5]] * 3, [-80.0, -120.0, log32(1e-30)], [[4, 4], [7, 2], [2, 3]]),
    "tiny head": rows_of([[1]] * 3, [[1e-6]] * 3, [-1e-6] * 3, [[4, 7], [3, 4], [8, 8]]),
    "all tail": rows_of([[1]] * 3, [[1e-8]] * 3, [1e-7] * 3, [[4, 7], [3, 4], [8, 8]]),
    "whole vocabulary": rows_of([list(range(9))] * 3, [[1 / 9] * 9] * 3, [-torch.inf] * 3, [[-1]] * 3),
    "stored zero": rows_of([[1, 2]] * 3, [[0.75, 0.0]] * 3, [log32(0.25)] * 3, [[4, 7]] * 3),
}


def allowed(name: str, mode: str) -> bool:
    if mode.startswith("reverse"):
        return name not in ("no support", "no tail", "all tail", "stored zero")
    return name != "no support" or mode == "sampled"


@on_each_device
@pytest.mark.parametrize(("name", "mode"), [(n, m) for n in ODD_ROWS for m in FULL_MODES if allowed(n, m)])
def test_odd_rows(name: str, mode: str, device: str) -> None:
    rows, logits = ODD_ROWS[name].to(device), normal(3, 9, seed=3).to(device)
    # A label in the support, among the draws, and neither.
    labels = torch.tensor([1, 4, 5], device=device)
    chosen = arguments(mode, labels, "mixed")
    loss, gradient = from_logits(logits, rows, torch.float32, impl="triton", **chosen)
    truth, expected = from_logits(logits, rows, torch.float64, impl="reference", **chosen)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=3e-7)


@on_each_device
@pytest.mark.parametrize("confidence", [17.0, 60.0, 100.0])
@pytest.mark.parametrize("mode", FULL_MODES)
def test_tail_keeps_its_digits_when_the_student_is_confident(mode: str, confidence: float, device: str) -> None:
    logits = normal(1, 33)
    logits[0, 5] = logits[0, 6:].logsumexp(0) + confidence
    logits[0, :5] = -200.0
    rows = rows_of([[5]], [[1.0]], [3.0 - confidence], [[9]]).to(device)
    chosen = arguments(mode, torch.tensor([11], device=device))
    loss, gradient = from_logits(logits.to(device), rows, torch.float32, impl="triton", **chosen)
    truth, expected = from_logits(logits.to(device), rows, torch.float64, impl="reference", **chosen)
    torch.testing.assert_close(loss.double(), truth, rtol=5e-6, atol=5e-6)
    tail_mass = float(torch.tensor(3.0 - confidence).exp())
    error = (gradient[:, 6:].double() - expected[:, 6:]).abs().max()
    assert error <= 2e-5 * tail_mass + torch.finfo(torch.float32).tiny


@on_each_device
@pytest.mark.parametrize("shape", ["plain", "capped"])
@pytest.mark.parametrize("mode", FULL_MODES)
def test_padded_vocabulary_columns_take_no_part(mode: str, shape: str, device: str) -> None:
    case = small(device, positions=2, vocab=20)
    weight = torch.cat([case.weight, torch.ones(4, 7, dtype=torch.float64, device=device)])
    bias = torch.cat([case.bias, torch.full((4,), -torch.inf, dtype=torch.float64, device=device)])
    padded, chosen = replace(case, weight=weight, bias=bias), options(case, mode, shape)
    actual = padded.run(torch.float32, impl="triton", **chosen)
    expected = case.run(**chosen)
    bottom = Result(expected.loss, expected.hidden, F.pad(expected.weight, (0, 0, 0, 4)), F.pad(expected.bias, (0, 4)))
    assert_close(actual, bottom, relative=1e-6)


@on_each_device
def test_softcap_is_exact_from_the_smallest_to_the_largest_logits(device: str) -> None:
    case = small(device, positions=3, vocab=30, bias=False)
    for size in (1e-4, 1.0, 30.0, 1e4):
        logits = normal(3, 30).mul(size).float().double().to(device)
        loss, gradient = from_logits(logits, case.rows, torch.float32, softcap=30.0, impl="triton")
        truth, expected = from_logits(logits, case.rows, torch.float64, softcap=30.0, impl="reference")
        torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


@on_each_device
def test_masked_positions_are_never_read(device: str) -> None:
    case = small(device, positions=5)
    masked = torch.tensor([0, 1, 0, 1, 1], dtype=torch.bool, device=device)
    rows = replace(
        case.rows,
        token_ids_PK=case.rows.token_ids_PK.masked_fill(masked[:, None], 10**9),
        logprobs_PK=case.rows.logprobs_PK.masked_fill(masked[:, None], torch.nan),
        log_tail_mass_P=case.rows.log_tail_mass_P.masked_fill(masked, torch.nan),
    )
    poisoned = replace(case, hidden=case.hidden.masked_fill(masked[:, None], torch.nan), rows=rows)
    expected = case.run(position_weight=~masked)
    assert_close(poisoned.run(torch.float32, impl="triton", position_weight=~masked), expected, relative=1e-6)
    nothing = poisoned.run(torch.float32, impl="triton", position_weight=torch.zeros(5, device=device))
    for _, value in nothing.items():
        assert (value == 0).all()


@on_each_device
def test_labels_alone_need_no_rows(device: str) -> None:
    case = small(device)
    leaves = case.leaves(torch.float32)
    chosen = {"labels": case.labels, "ce_weight": 1.0, "return_stats": True, "bias": leaves[2]}
    loss, stats = topk_kl(*leaves[:2], None, impl="triton", **chosen)
    expected = F.cross_entropy(case.hidden @ case.weight.t() + case.bias, case.labels)
    torch.testing.assert_close(loss.double(), expected)
    assert {name for name, value in vars(stats).items() if not value.isnan()} == {"ce", "student_entropy", "weight"}


@on_each_device
@pytest.mark.parametrize("positions", [1, 2])
def test_one_entry_one_sample_one_position_and_narrow_ids(positions: int, device: str) -> None:
    case = small(device, positions=positions, vocab=17, k=1, samples=1)
    rows = replace(
        case.rows,
        token_ids_PK=case.rows.token_ids_PK.int(),
        tail_token_ids_PN=case.rows.tail_token_ids_PN.int(),
    )
    for tail in ("sampled", "bucket"):
        actual = replace(case, rows=rows).run(torch.float32, impl="triton", tail=tail)
        assert_close(actual, case.run(tail=tail), relative=1e-6)


@on_each_device
def test_a_hidden_state_that_is_no_number_gives_a_loss_that_is_none(device: str) -> None:
    # And does not wait for ever: NaN is also what programs look for while they wait.
    case = small(device, positions=2, vocab=20_000 if device == "cuda" else 61)
    hidden = case.hidden.float().index_fill(0, torch.tensor([1], device=device), torch.nan)
    losses = topk_kl(hidden, case.weight.float(), case.rows, impl="triton", reduction="none")
    assert losses.isnan().tolist() == [False, True]


@on_each_device
@pytest.mark.parametrize("name", [name for name in BROKEN if not BROKEN[name].mode.endswith("renorm_both")])
def test_broken_rows_are_refused_in_the_same_words(name: str, device: str) -> None:
    broken, labels = BROKEN[name], LABELS.to(device)
    student = CASE.hidden.float().to(device), CASE.weight.float().to(device)
    words = []
    for impl in ("torch", "triton"):
        with pytest.raises(ValueError, match="not so at position") as refusal:
            topk_kl(*student, broken.rows.to(device), impl=impl, **arguments(broken.mode, labels))
        words.append(str(refusal.value))
    assert words[0] == words[1]


@on_each_device
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS.index_fill(0, torch.tensor([3]), 20)}, "a label must be .*: not so at position 3"),
        ({"labels": LABELS.index_fill(0, torch.tensor([3]), -1)}, "a label must be .*: not so at position 3"),
        ({"position_weight": torch.tensor([1.0, 1, -1, 1, 1, 1])}, "position_weight must .*: not so at position 2"),
        ({"position_weight": torch.tensor([1.0, 1, 1, torch.nan, 1, 1])}, "position_weight must .*: not so at position 3"),
    ],
)
def test_broken_labels_and_weights_are_refused(change: dict[str, Tensor], message: str, device: str) -> None:
    moved = {name: tensor.to(device) for name, tensor in change.items()}
    with pytest.raises(ValueError, match=message):
        topk_kl(
            CASE.hidden.float().to(device), CASE.weight.float().to(device), CASE.rows.to(device), impl="triton", **moved
        )


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
