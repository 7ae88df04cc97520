"""Every mode against its definition, written out position by position: `reference.py` is not its own judge.

Shapes: V vocabulary, K support entries of one row, D outcomes that the objective tells apart.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer_kl_cases import (
    MODES,
    SHAPED_MODES,
    SHAPES,
    Case,
    Result,
    assert_close,
    go_together,
    make_case,
    options,
)
from torch import Tensor

from teachercache.trainer.kl import TeacherRows, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")

# How a loss may be asked for. The reference has one way to differentiate.
WAYS: dict[str, dict[str, Any]] = {
    "mean": {"backward": "in_forward"},
    "mean recomputed": {"backward": "recompute"},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "reference": {"impl": "reference"},
    "reference none": {"impl": "reference", "reduction": "none"},
}


def kl(p_D: Tensor, q_D: Tensor) -> Tensor:
    """sum of p log(p / q), where an outcome without p costs nothing."""
    likely_D = p_D > 0
    return (p_D[likely_D] * (p_D[likely_D] / q_D[likely_D]).log()).sum()


def position_loss(
    logits_V: Tensor, row: TeacherRows, label: int, *, tail: str, divergence: str = "forward", beta: float = 0.5,
    ce_weight: float = 0.0, temperature: float = 1.0, t2_scaling: bool = False, logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """What the README's tables say of one position."""
    z_V = logits_V * logit_scale
    if softcap is not None:
        z_V = softcap * (z_V / softcap).tanh()
    q_V = (z_V / temperature).softmax(0)
    ids_K = row.token_ids_PK[0][row.token_ids_PK[0] >= 0].long()
    p_K = (row.logprobs_PK[0, : len(ids_K)].double() / temperature).exp()
    t = row.log_tail_mass_P[0].double().exp()
    p_K = p_K / p_K.sum() * (1.0 if tail.startswith("renorm") else 1 - t)
    target_V = torch.zeros_like(q_V).detach()
    target_V[ids_K] = p_K
    off_V = torch.ones_like(q_V, dtype=torch.bool)
    off_V[ids_K] = False
    if tail == "renorm_both":
        p_D, q_D = p_K, q_V[ids_K] / q_V[ids_K].sum()
    elif tail == "bucket":
        p_D, q_D = torch.cat([p_K, t[None]]), torch.cat([q_V[ids_K], q_V[off_V].sum()[None]])
    else:
        if tail == "to_label":
            target_V[label] += t
        p_D, q_D = target_V, q_V
    if divergence == "forward":
        loss = kl(p_D, q_D)
    elif divergence == "reverse":
        loss = kl(q_D, p_D)
    else:
        mixture_D = beta * p_D + (1 - beta) * q_D
        loss = beta * kl(p_D, mixture_D) + (1 - beta) * kl(q_D, mixture_D)
    if tail == "sampled":
        draws = [int(v) for v in row.tail_token_ids_PN[0] if v >= 0]
        for v in draws:
            target_V[v] += t / len(draws)
        loss = -row.entropy_P[0].double() - (target_V * q_V.log()).sum()
    mixed = (1 - ce_weight) * loss - (ce_weight * q_V[label].log() if ce_weight else 0.0)
    return mixed * (temperature**2 if t2_scaling else 1.0)


def defined(
    case: Case, weights: Tensor, *, labels: Tensor | None = None, **settings: Any
) -> tuple[Tensor, list[Tensor]]:
    """The weighted losses of all positions, 0 where masked, and the leaves that they depend on."""
    leaves = [leaf for leaf in case.leaves(torch.float64) if leaf is not None]
    logits = leaves[0] @ leaves[1].t() + (leaves[2] if len(leaves) > 2 else 0.0)
    losses = []
    for i, weight in enumerate(weights.double()):
        label = 0 if labels is None else int(labels[i])
        masked = weight == 0 or label == -100
        row = case.rows.select(slice(i, i + 1))
        losses.append(logits[i].sum() * 0 if masked else weight * position_loss(logits[i], row, label, **settings))
    return torch.stack(losses), leaves


def result(loss: Tensor, leaves: list[Tensor], upstream: Tensor) -> Result:
    """The loss and the gradients of its product with `upstream`."""
    gradients = [*torch.autograd.grad((loss * upstream).sum(), leaves), None]
    return Result(loss.detach(), *gradients[:3])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mode", "shape"), SHAPED_MODES)
def test_is_the_definition(mode: str, shape: str, way: str) -> None:
    case = make_case(positions=9, vocab=23)
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(9, generator=generator).masked_fill(torch.arange(9) % 4 == 3, 0.0)
    chosen = options(case, mode, shape)
    losses, leaves = defined(case, weights, **chosen)
    expected, upstream = losses, torch.randn(9, generator=generator).double()
    if "none" not in way:
        counted = weights != 0 if "labels" not in chosen else (weights != 0) & (case.labels != -100)
        expected = losses.sum() / (1.0 if way == "sum" else weights.double()[counted].sum())
        upstream = upstream[0]
    student = list(case.leaves(torch.float64))
    loss = topk_kl(
        student[0],
        student[1],
        case.rows,
        bias=student[2],
        position_weight=weights,
        chunk_bytes=1000,
        **chosen,
        **WAYS[way],
    )
    assert_close(result(loss, student, upstream), result(expected, leaves, upstream), relative=1e-13)


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(("mode", "shape"), SHAPED_MODES)
def test_loss_and_gradient_agree_by_finite_differences(mode: str, shape: str, backward: str) -> None:
    case = make_case(positions=4, vocab=13, width=3, k=3)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        chosen = options(case, mode, shape)
        return topk_kl(hidden, weight, case.rows, bias=bias, chunk_bytes=200, backward=backward, **chosen)

    # The fast mode perturbs all inputs at once, in one random direction.
    fast = backward == "recompute" or shape not in ("plain", "mixed")
    assert torch.autograd.gradcheck(loss, case.leaves(torch.float64), fast_mode=fast)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if go_together(mode, "tempered")])
def test_t2_scaling_multiplies_loss_and_gradient_alike(mode: str, impl: str) -> None:
    case = make_case()
    plain, scaled = (
        case.run(**options(case, mode, temperature=3.0, t2_scaling=on), backward="recompute", impl=impl)
        for on in (False, True)
    )
    for name, value in plain.items():
        torch.testing.assert_close(getattr(scaled, name), 9.0 * value)
    _, stats = topk_kl(
        case.hidden, case.weight, case.rows, return_stats=True, impl=impl, bias=case.bias,
        **options(case, mode, temperature=3.0, t2_scaling=True),
    )  # fmt: skip
    # The figure stays in nats.
    torch.testing.assert_close(stats.kl, plain.loss)


@settings(max_examples=80, deadline=None)
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
    mode, shape = data.draw(st.sampled_from(SHAPED_MODES), "mode")
    chosen = options(case, mode, shape)
    actual = case.run(
        **chosen,
        chunk_bytes=data.draw(st.integers(1, 4000), "chunk_bytes"),
        backward=data.draw(st.sampled_from([None, "in_forward", "recompute"]), "backward"),
    )
    assert_close(actual, case.run(**chosen, impl="reference"), relative=1e-12)


def test_the_modes_are_all_there_are() -> None:
    """A setting that the other tests leave out would be proved by none of them."""
    assert {go_together(mode, shape) for mode in MODES for shape in SHAPES} == {True, False}
    case, refused = make_case(positions=2), 0
    for divergence in ("forward", "reverse", "jsd"):
        for tail in ("sampled", "bucket", "truncated", "renorm", "renorm_both", "to_label"):
            mode = tail if divergence == "forward" else f"{divergence}-{tail}"
            if mode not in MODES:
                refused += 1
                with pytest.raises(ValueError, match="needs both sides on the same outcomes"):
                    case.run(divergence=divergence, tail=tail, labels=case.labels)
    assert refused == 8
