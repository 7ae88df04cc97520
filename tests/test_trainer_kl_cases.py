"""Cases for the loss's tests, and the proof that they keep the contract that the loss asks of its inputs.

Shapes: P positions, V vocabulary, H hidden width, K support entries, N tail samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from teachercache.trainer.kl import TeacherRows, topk_kl
from teachercache.trainer.kl.objective import SYMMETRIC_TAILS, TEMPERED_TAILS, Objective, TailTerm
from teachercache.trainer.kl.packing import pack
from teachercache.trainer.kl.reference import dense_logits, dense_loss

TAILS = get_args(TailTerm)
# Every divergence with every tail that it is defined for; the name of a forward one is its tail's.
MODES = (*TAILS, *(f"{divergence}-{tail}" for divergence in ("reverse", "jsd") for tail in SYMMETRIC_TAILS))
# Those that look at the whole vocabulary.
FULL_MODES = tuple(mode for mode in MODES if not mode.endswith("renorm_both"))
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"logit_scale": 0.7},
    "capped": {"softcap": 3.0},
    "tempered": {"temperature": 2.0},
    "t2": {"temperature": 0.6, "t2_scaling": True, "logit_scale": 1.2, "softcap": 5.0},
    "mixed": {"ce_weight": 0.3},
    "everything": {"ce_weight": 0.3, "logit_scale": 1.3, "softcap": 4.0},
    "labels": {"ce_weight": 1.0, "softcap": 4.0},
}
# What an error may exceed plain PyTorch's by.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def go_together(mode: str, shape: str) -> bool:
    """Whether these logits are allowed under that mode."""
    tempered, mixed = "temperature" in SHAPES[shape], "ce_weight" in SHAPES[shape]
    return (not tempered or mode.endswith(TEMPERED_TAILS)) and (not mixed or mode in FULL_MODES)


SHAPED_MODES = [(mode, shape) for mode in MODES for shape in SHAPES if go_together(mode, shape)]


@dataclass(frozen=True)
class Result:
    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def items(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in vars(self).items() if value is not None]


@dataclass(frozen=True)
class Case:
    """One student and its teacher's rows; float64, to be rounded to the dtype under test."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: TeacherRows
    labels: Tensor
    teacher_logits: Tensor

    def rounded(self, dtype: torch.dtype) -> Case:
        """The same case with the student's numbers as `dtype` has them, in float64 again."""
        bias = None if self.bias is None else self.bias.to(dtype).double()
        return replace(self, hidden=self.hidden.to(dtype).double(), weight=self.weight.to(dtype).double(), bias=bias)

    def to(self, device: str) -> Case:
        """The same case on another device."""
        return Case(**{name: None if x is None else x.to(device) for name, x in vars(self).items()})

    def leaves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        hidden, weight, bias = (
            None if tensor is None else tensor.detach().to(dtype).requires_grad_()
            for tensor in (self.hidden, self.weight, self.bias)
        )
        assert hidden is not None
        assert weight is not None
        return hidden, weight, bias

    def run(self, dtype: torch.dtype = torch.float64, **options: Any) -> Result:
        """Loss and gradients of `topk_kl`."""
        hidden, weight, bias = self.leaves(dtype)
        loss = topk_kl(hidden, weight, self.rows, bias=bias, **options)
        return differentiate(loss, hidden, weight, bias)

    def truth(self, dtype: torch.dtype, **options: Any) -> Result:
        """Loss and gradients of the dense definition in float64, for the inputs that `dtype` can hold."""
        return self.rounded(dtype).run(impl="reference", **options)

    def plain(self, dtype: torch.dtype, *, labels: Tensor | None = None, **settings: Any) -> Result:
        """What one would have written: a linear layer in `dtype`, the dense loss on its output in float32."""
        hidden, weight, bias = self.leaves(dtype)
        objective = Objective(**settings)
        packed = pack(self.rows, None, labels, ignore_index=-100, objective=objective, dtype=torch.float32)
        part = packed.part(slice(0, len(packed)))
        logits = dense_logits(F.linear(hidden, weight, bias)[part.index_C].float(), objective)
        return differentiate(dense_loss(logits, part).mean() * objective.factor, hidden, weight, bias)


def arguments(mode: str, labels: Tensor, shape: str = "plain", **more: Any) -> dict[str, Any]:
    """The arguments of `topk_kl` for this mode; labels only where it reads them."""
    divergence, _, tail = mode.rpartition("-")
    chosen: dict[str, Any] = {"tail": tail, **SHAPES[shape], **more}
    if divergence:
        chosen |= {"divergence": divergence} | ({"beta": 0.3} if divergence == "jsd" else {})
    if tail == "to_label" or chosen.get("ce_weight"):
        chosen["labels"] = labels
    return chosen


def options(case: Case, mode: str, shape: str = "plain", **more: Any) -> dict[str, Any]:
    """The same with a case's labels."""
    return arguments(mode, case.labels, shape, **more)


def from_logits(logits: Tensor, rows: TeacherRows, dtype: torch.dtype, **chosen: Any) -> tuple[Tensor, Tensor]:
    """The summed loss and its gradient in the logits: hidden states are the logits, the head is the identity."""
    hidden = logits.detach().to(dtype, copy=True).requires_grad_()
    loss = topk_kl(
        hidden, torch.eye(logits.shape[1], dtype=dtype, device=logits.device), rows, reduction="sum", **chosen
    )
    loss.backward()
    assert hidden.grad is not None
    return loss.detach(), hidden.grad


def rows_of(
    ids: list[list[int]], probabilities: list[list[float]], log_tail: list[float], draws: list[list[int]]
) -> TeacherRows:
    """Rows as one writes them down; their entropy is 0.5."""
    entropy = torch.full((len(ids),), 0.5)
    return TeacherRows(
        torch.tensor(ids), torch.tensor(probabilities).log(), torch.tensor(log_tail), torch.tensor(draws), entropy
    )


def differentiate(loss: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Result:
    """The gradients that a loss gives its leaves."""
    loss.backward()
    return Result(loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log32(value: float) -> float:
    """The logarithm as float32 stores it."""
    return float(torch.tensor(value).log())


def make_case(
    positions: int = 11,
    vocab: int = 61,
    width: int = 7,
    k: int = 5,
    samples: int = 3,
    *,
    bias: bool = True,
    ragged: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """A random student, and a teacher near it; ragged rows hold from 1 to k entries; one label in five is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, offset = normal(positions, width), normal(vocab, width) / width**0.5 * 2, normal(vocab)
    teacher_logits = hidden @ weight.t() + normal(positions, vocab)
    lengths = torch.randint(1, k + 1, (positions,), generator=generator) if ragged else torch.full((positions,), k)
    labels = torch.randint(vocab, (positions,), generator=generator)
    labels[torch.rand(positions, generator=generator) < 0.2] = -100
    u = torch.rand(positions, generator=generator, dtype=torch.float64)
    rows = make_rows(teacher_logits, lengths, k, samples, u)
    return Case(hidden, weight, offset if bias else None, rows, labels, teacher_logits).to(device)


def make_rows(logits_PV: Tensor, lengths_P: Tensor, k: int, samples: int, u_P: Tensor) -> TeacherRows:
    """What a teacher with these logits stores."""
    log_p_PV = logits_PV.double().log_softmax(1)
    logprobs_PK, ids_PK = log_p_PV.topk(k, dim=1)
    kept_PK = torch.arange(k) < lengths_P[:, None]
    columns_PK = torch.where(kept_PK, ids_PK, ids_PK[:, :1])
    log_tail_PV = log_p_PV.scatter(1, columns_PK, -torch.inf)
    return TeacherRows(
        torch.where(kept_PK, ids_PK, -1),
        torch.where(kept_PK, logprobs_PK, -torch.inf).float(),
        log_tail_PV.logsumexp(1).float(),
        torch.stack([systematic_draws(log_p.exp(), samples, u) for log_p, u in zip(log_tail_PV, u_P, strict=True)]),
        -torch.xlogy(log_p_PV.exp(), log_p_PV.exp()).sum(1).float(),
    )


def systematic_draws(tail_V: Tensor, samples: int, u: Tensor) -> Tensor:
    """Draw j is the first v whose prefix sum exceeds (u + j)/n of the tail; all padding for an empty tail."""
    prefix_V = tail_V.cumsum(0)
    if prefix_V[-1] == 0:
        return torch.full((samples,), -1)
    return torch.searchsorted(prefix_V, (u + torch.arange(samples)) / samples * prefix_V[-1], right=True)


def assert_close(actual: Result, expected: Result, *, relative: float) -> None:
    """Every part within `relative` of the expected part's norm, or of 1 where that is less."""
    for name, value in expected.items():
        error = (getattr(actual, name).double() - value.double()).norm()
        assert error <= relative * max(1.0, float(value.norm())), f"{name} is off by {error:.2e}"


def assert_no_worse_than_plain(actual: Result, plain: Result, truth: Result, tolerance: float) -> None:
    """Norm-wise and at the worst element: no larger an error than plain PyTorch's in that dtype."""
    for name, expected in truth.items():
        # a loss near 0 is what terms near 1 leave of each other
        least = 0.1 if name == "loss" else 1e-3
        error, allowed = ((getattr(result, name).double() - expected).abs() for result in (actual, plain))
        for measure in (torch.linalg.vector_norm, torch.max):
            bound = measure(allowed) + tolerance * max(least, float(measure(expected.abs())))
            assert measure(error) <= bound, f"{name}: {measure(error):.2e} > {bound:.2e}"


@pytest.mark.parametrize("ragged", [False, True])
def test_a_case_is_a_distribution_with_draws_from_its_tail(ragged: bool) -> None:
    rows = make_case(positions=40, ragged=ragged).rows
    kept_PK = rows.token_ids_PK >= 0
    assert bool((kept_PK.sum(1) < kept_PK.shape[1]).any()) == ragged
    mass_P = rows.logprobs_PK.exp().sum(1) + rows.log_tail_mass_P.exp()
    torch.testing.assert_close(mass_P, torch.ones(40))
    assert rows.tail_token_ids_PN is not None
    assert (rows.tail_token_ids_PN >= 0).all()
    assert not (rows.tail_token_ids_PN[:, :, None] == rows.token_ids_PK[:, None, :]).any()


def test_a_case_of_the_whole_vocabulary_has_an_empty_tail() -> None:
    rows = make_case(vocab=6, k=6, ragged=False).rows
    assert (rows.log_tail_mass_P == -torch.inf).all()
    assert rows.tail_token_ids_PN is not None
    assert (rows.tail_token_ids_PN == -1).all()
