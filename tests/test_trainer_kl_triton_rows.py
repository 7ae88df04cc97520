"""The Triton kernels on rows of every kind, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_trainer_kl_cases import (
    FULL_MODES,
    Result,
    arguments,
    assert_close,
    differentiate,
    from_logits,
    log32,
    normal,
    options,
    rows_of,
)
from test_trainer_kl_refusals import BROKEN, CASE, LABELS
from test_trainer_kl_triton import on_each_device, pytestmark, small  # noqa: F401
from torch import Tensor

from teachercache.trainer.kl import TeacherRows, topk_kl, triton_chunks

ODD_ROWS = {
    "none of it": rows_of([[1, 0]] * 3, [[0.5, 0.25]] * 3, [log32(0.25)] * 3, [[4, 4], [7, 4], [2, 3]]),
    "equal draws": rows_of([[1]] * 3, [[0.5]] * 3, [log32(0.5)] * 3, [[4, 4, 4, 7], [4, 7, 4, 7], [7, 7, 7, 7]]),
    "ragged draws": rows_of([[1]] * 3, [[0.5]] * 3, [log32(0.5)] * 3, [[4, 3, -1, -1], [-1, 4, -1, -1], [7, 7, 7, 7]]),
    "no support": rows_of([[-1]] * 3, [[0.0]] * 3, [0.0] * 3, [[4, 4, 0], [8, 4, 2], [3, 3, 3]]),
    "no tail": rows_of([[1, 0]], [[0.5, 0.5]], [-torch.inf], [[-1, -1]]),
    "tiny tail": rows_of([[1, 0]] * 3, [[0.5, 0.5]] * 3, [-80.0, -120.0, log32(1e-30)], [[4, 4], [7, 2], [2, 3]]),
    "tiny head": rows_of([[1]], [[1e-6]], [-1e-6], [[4, 7]]),
    "all tail": rows_of([[1]], [[1e-8]], [1e-7], [[4, 7]]),
    "whole vocabulary": rows_of([list(range(9))], [[1 / 9] * 9], [-torch.inf], [[-1]]),
    "stored zero": rows_of([[1, 2]], [[0.75, 0.0]], [log32(0.25)], [[4, 7]]),
}
REFUSED_IN_REVERSE = ("no tail", "all tail", "stored zero")


@on_each_device
@pytest.mark.parametrize("name", ODD_ROWS)
def test_odd_rows(name: str, device: str) -> None:
    rows = ODD_ROWS[name].to(device)
    logits = normal(len(rows), 9, seed=3).to(device)
    # A label in the support, among the draws, and neither.
    labels = torch.tensor([1, 4, 5], device=device)[-len(rows) :]
    for mode in ("sampled",) if "draws" in name or name == "no support" else FULL_MODES:
        if mode == "reverse-bucket" and name in REFUSED_IN_REVERSE:
            continue
        chosen = arguments(mode, labels, "mixed")
        loss, gradient = from_logits(logits, rows, torch.float32, impl="triton", **chosen)
        truth, expected = from_logits(logits, rows, torch.float64, impl="reference", **chosen)
        torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=3e-7)


@on_each_device
@pytest.mark.parametrize("confidence", [17.0, 100.0])
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
@pytest.mark.parametrize("mode", ["sampled", "jsd-bucket"])
def test_tensors_that_are_views_of_others(mode: str, device: str) -> None:
    # A smaller k is a slice of the columns.
    case = small(device, ragged=False)

    def strided(tensor: Tensor) -> Tensor:
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype, device=device)
        wide[..., 1::2] = tensor
        assert not wide[..., 1::2].is_contiguous()
        return wide[..., 1::2]

    rows = TeacherRows(*(strided(tensor) for tensor in vars(case.rows).values()))
    hidden, weight, bias = case.leaves(torch.float32)
    chosen = options(case, mode, "mixed") | {"labels": strided(case.labels)}
    loss = topk_kl(strided(hidden), strided(weight), rows, bias=strided(bias), impl="triton", **chosen)
    assert_close(differentiate(loss, hidden, weight, bias), case.run(**options(case, mode, "mixed")), relative=2e-6)


@on_each_device
def test_a_hidden_state_that_is_no_number_gives_a_loss_that_is_none(device: str) -> None:
    # And does not wait for ever: NaN is also what programs look for while they wait.
    case = small(device, positions=2, vocab=20_000 if device == "cuda" else 61)
    hidden = case.hidden.float().index_fill(0, torch.tensor([1], device=device), torch.nan)
    losses = topk_kl(hidden, case.weight.float(), case.rows, impl="triton", reduction="none")
    assert losses.isnan().tolist() == [False, True]
    elsewhere = [v for v in range(61) if v not in case.rows.token_ids_PK.flatten().tolist()]
    weight = case.weight.float().index_fill(0, torch.tensor(elsewhere[:1], device=device), torch.nan)
    losses = topk_kl(case.hidden.float(), weight, case.rows, impl="triton", reduction="none", tail="bucket")
    assert losses.isnan().all()


@on_each_device
@pytest.mark.parametrize("name", [name for name in BROKEN if not BROKEN[name].mode.endswith("renorm_both")])
def test_broken_rows_are_refused_in_the_same_words(name: str, device: str) -> None:
    broken, labels, words = BROKEN[name], LABELS.to(device), []
    student = CASE.hidden.float().to(device), CASE.weight.float().to(device)
    # Few positions, for the interpreter's sake.
    weights = torch.zeros(6, device=device).index_fill(0, torch.tensor([0, broken.position], device=device), 1.0)
    chosen = arguments(broken.mode, labels, position_weight=weights)
    for impl in ("torch", "triton"):
        with pytest.raises(ValueError, match=f"not so at position {broken.position}") as refusal:
            topk_kl(*student, broken.rows.to(device), impl=impl, **chosen)
        words.append(str(refusal.value))
    assert words[0] == words[1]


@on_each_device
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS.index_fill(0, torch.tensor([3]), 20)}, "a label must be .*: not so at position 3"),
        ({"labels": LABELS.index_fill(0, torch.tensor([3]), -1)}, "a label must be .*: not so at position 3"),
        ({"position_weight": torch.tensor([1.0, 1, -1, 1, 1, 1])}, "position_weight must .*: not so at position 2"),
        (
            {"position_weight": torch.tensor([1.0, 1, 1, torch.nan, 1, 1])},
            "position_weight must .*: not so at position 3",
        ),
    ],
)
def test_broken_labels_and_weights_are_refused(change: dict[str, Tensor], message: str, device: str) -> None:
    moved = {name: tensor.to(device) for name, tensor in change.items()}
    with pytest.raises(ValueError, match=message):
        topk_kl(
            CASE.hidden.float().to(device), CASE.weight.float().to(device), CASE.rows.to(device), impl="triton", **moved
        )


@on_each_device
def test_a_support_of_the_whole_vocabulary_cannot_leave_a_tail(device: str) -> None:
    case = small(device, positions=2, vocab=3, k=3, ragged=False)
    rows = replace(case.rows, log_tail_mass_P=torch.full((2,), -5.0, device=device))
    with pytest.raises(ValueError, match="covers the vocabulary must have an empty tail: not so at position 0"):
        topk_kl(case.hidden.float(), case.weight.float(), rows, tail="bucket", impl="triton")


@on_each_device
def test_rows_of_too_many_entries_are_left_to_the_torch_path(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(device, positions=1)
    student = case.hidden.float(), case.weight.float(), case.rows
    monkeypatch.setattr(triton_chunks, "MAX_K", 4)
    with pytest.raises(ValueError, match="its rows hold at most 4 entries and 128 tail samples; use 'torch'"):
        topk_kl(*student, tail="bucket", impl="triton")
    assert torch.isfinite(topk_kl(*student, tail="bucket"))
    monkeypatch.setattr(triton_chunks, "MAX_K", 5)
    monkeypatch.setattr(triton_chunks, "MAX_SAMPLES", 2)
    with pytest.raises(ValueError, match="its rows hold at most 5 entries and 2 tail samples; use 'torch'"):
        topk_kl(*student, tail="sampled", impl="triton")
    # `bucket` does not look at them.
    assert torch.isfinite(topk_kl(*student, tail="bucket", impl="triton"))
