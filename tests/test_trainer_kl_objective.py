"""What the objectives are: their values and optima, and that `sampled` is the full KL in expectation.

Shapes: V vocabulary, I intervals of u between two changes of the draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_trainer_kl_cases import FULL_MODES, MODES, make_case, make_rows, options, systematic_draws
from torch import Tensor

from teachercache.trainer.kl import KLStats, TeacherRows, targets, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")


def kl(logits: Tensor, rows: TeacherRows, tail: str, **options: object) -> Tensor:
    """The loss of each row of logits, summed: the head is the identity."""
    head = torch.eye(logits.shape[1], dtype=logits.dtype)
    return topk_kl(logits, head, rows, tail=tail, reduction="sum", **options)


def full_kl(teacher: Tensor, student: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="none").sum(1)


def gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf), leaf)[0]


def full_divergence(teacher: Tensor, student: Tensor, divergence: str) -> Tensor:
    if divergence == "reverse":
        return full_kl(student, teacher)
    if divergence == "jsd":
        mixture = (0.3 * teacher.softmax(1) + 0.7 * student.softmax(1)).log()
        return 0.3 * full_kl(teacher, mixture) + 0.7 * full_kl(student, mixture)
    return full_kl(teacher, student)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_bucket_is_a_lower_bound_of_the_full_divergence_and_not_negative(divergence: str) -> None:
    case = make_case(positions=50)
    student = case.hidden @ case.weight.t()
    bucket = topk_kl(
        case.hidden, case.weight, case.rows, tail="bucket", divergence=divergence, beta=0.3, reduction="none"
    )
    assert (bucket >= -1e-7).all()
    assert (bucket <= full_divergence(case.teacher_logits, student, divergence) + 1e-6).all()


def test_bucket_is_the_kl_of_the_outcomes_it_tells_apart() -> None:
    case = make_case(positions=20, ragged=False)
    student = case.hidden @ case.weight.t()

    def outcomes(logits: Tensor) -> Tensor:
        p = logits.softmax(1)
        head = p.gather(1, case.rows.token_ids_PK)
        return torch.cat([head, 1 - head.sum(1, keepdim=True)], 1)

    expected = full_kl(outcomes(case.teacher_logits).log(), outcomes(student).log()).sum()
    torch.testing.assert_close(kl(student, case.rows, "bucket"), expected, rtol=1e-6, atol=1e-6)


def test_truncated_is_the_renormalised_kl_weighted_by_the_mass() -> None:
    # M KL(p/M || q) + M log M: research notes on what truncated caches are trained with.
    case = make_case(positions=20, ragged=False)
    student = case.hidden @ case.weight.t()
    mass = -torch.expm1(case.rows.log_tail_mass_P.double())
    kept = case.rows.logprobs_PK.double().softmax(1)
    renormalised = (kept * (kept.log() - student.log_softmax(1).gather(1, case.rows.token_ids_PK))).sum(1)
    expected = (mass * renormalised + mass * mass.log()).sum()
    torch.testing.assert_close(kl(student, case.rows, "truncated"), expected)


@pytest.mark.parametrize("tail", ["bucket", "sampled"])
def test_rounded_logprobs_do_not_move_the_optimum_off_mass_one(tail: str) -> None:
    # bf16 logprobs of confident rows: M + t is off 1 by far more than the tail mass itself.
    teacher = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).double()
    teacher[:, 3] += 12
    rows = make_rows(teacher, torch.full((16,), 6), 6, 4, torch.full((16,), 0.5, dtype=torch.float64))
    rounded = replace(rows, logprobs_PK=(rows.logprobs_PK * 1.004).bfloat16().float())
    moved = rounded.logprobs_PK.exp().sum(1) + rows.log_tail_mass_P.exp() - 1
    assert moved.abs().max() > 1e-6
    summed = gradient(lambda z: kl(z, rounded, tail), torch.randn(16, 40).double()).sum(1)
    assert summed.abs().max() < 1e-7


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "sampled"])
def test_optimum(mode: str) -> None:
    """Gradient zero at the teacher for the buckets; at p/M, which has all tail mass in the support, for the rest."""
    case = make_case(positions=9, ragged=False)
    chosen = options(case, mode)
    # To the teacher itself the label is one more draw: it is where the whole tail goes.
    labels = case.rows.tail_token_ids_PN[:, 0]
    chosen = chosen | ({"labels": labels} if "labels" in chosen else {})
    log_p = case.teacher_logits.log_softmax(1)
    off_support = torch.ones_like(log_p, dtype=torch.bool).scatter(1, case.rows.token_ids_PK, False)
    best = log_p if "bucket" in mode else log_p.masked_fill(off_support, -1e4)
    if mode == "to_label":
        best = best.scatter(1, labels[:, None], case.rows.log_tail_mass_P.double()[:, None])
    assert gradient(lambda z: kl(z, case.rows, **chosen), best).abs().max() < 1e-7
    if mode in ("truncated", "renorm", "to_label"):
        assert gradient(lambda z: kl(z, case.rows, **chosen), log_p).abs().max() > 1e-2


def test_renorm_both_says_nothing_of_the_mass_on_the_support() -> None:
    case = make_case(positions=9, ragged=False)
    log_p = case.teacher_logits.log_softmax(1)
    elsewhere = log_p.scatter_add(1, case.rows.token_ids_PK, torch.full((9, 5), -3.0).double())
    for mode in ("renorm_both", "reverse-renorm_both", "jsd-renorm_both"):
        assert gradient(lambda z, m=mode: kl(z, case.rows, **options(case, m)), elsewhere).abs().max() < 1e-7


def test_cross_entropy_alone_is_pytorch_s_and_needs_no_rows() -> None:
    case = make_case(positions=40)
    logits = case.hidden @ case.weight.t()
    loss = topk_kl(case.hidden, case.weight, None, labels=case.labels, ce_weight=1.0)
    torch.testing.assert_close(loss, F.cross_entropy(logits, case.labels))
    with_rows = topk_kl(case.hidden, case.weight, case.rows, labels=case.labels, ce_weight=1.0)
    torch.testing.assert_close(loss, with_rows)


def test_labels_without_weight_only_mask() -> None:
    case = make_case(positions=20)
    counted = case.labels != -100
    assert not counted.all()
    loss = topk_kl(case.hidden, case.weight, case.rows, labels=case.labels)
    torch.testing.assert_close(loss, topk_kl(case.hidden, case.weight, case.rows, position_weight=counted))


def test_auto_follows_the_rows() -> None:
    case = make_case()
    plain = replace(case.rows, tail_token_ids_PN=None, entropy_P=None)
    for rows, divergence, tail in (
        (case.rows, "forward", "sampled"),
        (plain, "forward", "bucket"),
        (case.rows, "reverse", "bucket"),
        (case.rows, "jsd", "bucket"),
    ):
        explicit = topk_kl(case.hidden, case.weight, rows, tail=tail, divergence=divergence)
        assert torch.equal(topk_kl(case.hidden, case.weight, rows, divergence=divergence), explicit)


def integral_over_u(teacher_V: Tensor, samples: int) -> tuple[TeacherRows, Tensor]:
    """A row for each interval of u in (0, 1) in which the draws are the same, and the interval's length."""
    rows = make_rows(teacher_V[None], torch.tensor([4]), 4, samples, torch.tensor([0.5], dtype=torch.float64))
    tail_V = teacher_V.softmax(0).scatter(0, rows.token_ids_PK[0], 0.0)
    prefix_V = tail_V.cumsum(0)
    ends_I = torch.cat([prefix_V / prefix_V[-1] * samples % 1.0, torch.tensor([0.0, 1.0]).double()]).unique()
    middles_I, lengths_I = (ends_I[1:] + ends_I[:-1]) / 2, ends_I.diff()
    draws_IN = torch.stack([systematic_draws(tail_V, samples, u) for u in middles_I])
    repeated = rows.select(torch.zeros(len(middles_I), dtype=torch.int64))
    return replace(repeated, tail_token_ids_PN=draws_IN), lengths_I


def expectation_error(samples: int, seed: int) -> tuple[float, float]:
    """How far the mean over u of loss and gradient is from the full KL's; the mean is exact."""
    generator = torch.Generator().manual_seed(seed)
    teacher_V, student_V = torch.randn(2, 23, generator=generator).double().mul(1.5)
    rows, lengths_I = integral_over_u(teacher_V, samples)
    leaf_V = student_V.clone().requires_grad_()
    mean = kl(leaf_V.expand(len(lengths_I), -1), rows, "sampled", position_weight=lengths_I)
    (slope_V,) = torch.autograd.grad(mean, leaf_V)
    value_error = (mean - full_kl(teacher_V[None], student_V[None])).abs()
    slope_error = (slope_V - (student_V.softmax(0) - teacher_V.softmax(0))).abs().max()
    return float(value_error.detach()), float(slope_error)


@pytest.mark.parametrize("samples", [1, 3, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_is_the_full_kl_in_expectation(samples: int, seed: int) -> None:
    value_error, slope_error = expectation_error(samples, seed)
    assert value_error < 2e-6
    assert slope_error < 2e-7


def test_a_wrong_weight_of_the_draws_is_seen_by_that_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = targets.draw_weights
    monkeypatch.setattr(targets, "draw_weights", lambda drawn, tail: right(drawn, tail) * 3 / (3 + 1))
    _, slope_error = expectation_error(3, 0)
    assert slope_error > 1e-3


def test_a_row_of_the_sampled_loss_may_be_negative_and_is_not_clamped() -> None:
    case = make_case(positions=200, k=2, samples=2)
    teacher = case.teacher_logits
    values = torch.stack([kl(teacher[i : i + 1], case.rows.select(slice(i, i + 1)), "sampled") for i in range(200)])
    assert (values < -0.01).any()
    assert values.mean().abs() < 0.1


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("mode", MODES)
def test_stats_are_those_of_the_definition(mode: str, backward: str) -> None:
    case = make_case(positions=31, bias=False)
    weights = torch.rand(31, generator=torch.Generator().manual_seed(0))
    mixed = mode in FULL_MODES
    chosen = options(case, mode, "everything" if mixed else "capped", position_weight=weights, backward=backward)
    chosen |= {"labels": case.labels, "chunk_bytes": 3000}
    figures: dict[str, KLStats] = {}
    for impl in ("torch", "reference"):
        plain = topk_kl(case.hidden, case.weight, case.rows, impl=impl, **chosen)
        loss, figures[impl] = topk_kl(case.hidden, case.weight, case.rows, impl=impl, return_stats=True, **chosen)
        torch.testing.assert_close(loss, plain)
        whole = 0.7 * figures[impl].kl + 0.3 * figures[impl].ce if mixed else figures[impl].kl
        torch.testing.assert_close(whole, loss)
    for name, expected in vars(figures["reference"]).items():
        torch.testing.assert_close(getattr(figures["torch"], name), expected, equal_nan=True)
    stats = figures["torch"]
    assert 0 < stats.top1_agreement < 1
    counted = case.labels != -100
    weights_C = weights[counted].double()
    torch.testing.assert_close(stats.weight, weights_C.sum())
    mass = -torch.expm1(case.rows.log_tail_mass_P.double()[counted])
    torch.testing.assert_close(stats.support_mass, (mass * weights_C).sum() / weights_C.sum())
    # `renorm_both` never sees the logits that these are of.
    assert stats.student_entropy.isnan() == stats.ce.isnan() == (not mixed)
    if mixed:
        logits = case.hidden @ case.weight.t() * 1.3
        q = (4.0 * (logits / 4.0).tanh()).log_softmax(1)[counted]
        torch.testing.assert_close(stats.student_entropy, (-(q.exp() * q).sum(1) * weights_C).sum() / weights_C.sum())
        ce = F.nll_loss(q, case.labels[counted], reduction="none")
        torch.testing.assert_close(stats.ce, (ce * weights_C).sum() / weights_C.sum())


def test_the_tail_s_part_of_the_objective() -> None:
    case = make_case(positions=20, ragged=False)
    student = (case.hidden @ case.weight.t()).softmax(1)
    t = case.rows.log_tail_mass_P.double().exp()
    q_tail = 1 - student.gather(1, case.rows.token_ids_PK).sum(1)
    for tail, expected in (("bucket", t * (t / q_tail).log()), ("truncated", t * 0)):
        _, stats = topk_kl(case.hidden, case.weight, case.rows, tail=tail, return_stats=True)
        torch.testing.assert_close(stats.tail_kl, expected.mean(), rtol=1e-6, atol=1e-9)


def test_stats_that_cannot_be_known_are_nan() -> None:
    case = make_case(positions=5)
    _, labels_only = topk_kl(case.hidden, case.weight, None, labels=case.labels, ce_weight=1.0, return_stats=True)
    known = {name for name, value in vars(labels_only).items() if not value.isnan()}
    assert known == {"ce", "student_entropy", "weight"}
    _, teacher_only = topk_kl(case.hidden, case.weight, case.rows, return_stats=True)
    assert {name for name, value in vars(teacher_only).items() if value.isnan()} == {"ce"}
    share = teacher_only.tail_share
    torch.testing.assert_close(share, teacher_only.tail_kl / teacher_only.kl)
    _, nothing = topk_kl(case.hidden, case.weight, case.rows, position_weight=torch.zeros(5), return_stats=True)
    assert nothing.weight == 0
    assert nothing.kl.isnan()
