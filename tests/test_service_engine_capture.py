"""Rows from logits against the definitions in float64."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from engine_reference import assert_rows_match, chi_square, plain_row

from teachercache.format_spec import PAD_ID, InvalidRows, Rows, tail_uniforms
from teachercache.service.engines.capture import capture

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


def random_logits(positions: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(positions, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def uniforms(positions: int) -> np.ndarray:
    return tail_uniforms(3, b"\x01" * 32, positions)


def rows_of(logits_PV: torch.Tensor, k: int, tail_samples: int, block_bytes: int | None = None) -> Rows:
    u = uniforms(len(logits_PV))
    return capture(logits_PV, k=k, tail_samples=tail_samples, uniforms_P=u, block_bytes=block_bytes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("vocab_size", "k", "tail_samples"),
    [(1, 1, 1), (2, 1, 3), (7, 7, 2), (61, 5, 1), (61, 60, 16), (1009, 16, 16), (5003, 100, 0), (5003, 1, 100)],
)
def test_every_column_is_what_its_definition_says(vocab_size: int, k: int, tail_samples: int, device: str) -> None:
    logits_PV = random_logits(23, vocab_size)
    rows = rows_of(logits_PV.to(device), k, tail_samples)
    assert (len(rows), rows.k, rows.tail_samples) == (23, k, tail_samples)
    assert_rows_match(rows, logits_PV, uniforms(23))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gap", [1.0, 10.0, 30.0, 60.0, 300.0])
def test_a_tiny_tail_mass_keeps_its_digits(gap: float, device: str) -> None:
    logits_PV = random_logits(20, 1009, scale=1.0)
    logits_PV[:, 500:504] += gap
    rows = rows_of(logits_PV.to(device), k=4, tail_samples=16)
    assert rows.log_tail_mass_P.max() < 8 - gap
    assert_rows_match(rows, logits_PV, uniforms(20))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("k", [1, 2, 16, 100, 499, 500])
def test_ties_go_to_the_lowest_ids(k: int, device: str) -> None:
    logits_PV = random_logits(50, 500, scale=2.0).round()
    rows = rows_of(logits_PV.to(device), k, tail_samples=4)
    expected = [plain_row(logits, k, 4, 0.5).ids for logits in logits_PV.numpy()]
    assert rows.token_ids_PK.tolist() == expected
    assert_rows_match(rows, logits_PV, uniforms(50))


def test_bfloat16_logits_count_as_the_numbers_they_are() -> None:
    logits_PV = random_logits(30, 2003).bfloat16()
    rows = rows_of(logits_PV, k=50, tail_samples=8)
    assert rows.token_ids_PK.tolist() == [plain_row(z, 50, 8, 0.5).ids for z in logits_PV.float().numpy()]
    assert_rows_match(rows, logits_PV, uniforms(30))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("finite", [1, 3, 4, 5, 40])
def test_minus_infinity_is_neither_kept_nor_drawn(finite: int, device: str) -> None:
    logits_PV = torch.full((17, 97), -torch.inf)
    logits_PV[:, 11 : 11 + finite] = random_logits(17, finite)
    rows = rows_of(logits_PV.to(device), k=4, tail_samples=6)
    assert_rows_match(rows, logits_PV, uniforms(17))
    assert ((rows.token_ids_PK >= 0).sum(1) == min(finite, 4)).all()
    tail = rows.tail_token_ids_PN
    assert tail is not None
    if finite <= 4:
        assert (tail == PAD_ID).all()
        assert (rows.log_tail_mass_P == -np.inf).all()
    else:
        assert ((tail >= 11) & (tail < 11 + finite)).all()


@pytest.mark.parametrize("k", [1, 5, 40])
def test_unusable_positions_are_absent_and_leave_the_others_alone(k: int) -> None:
    logits_PV = random_logits(6, 40)
    clean = rows_of(logits_PV, k, tail_samples=3)
    logits_PV[1, 7] = torch.nan
    logits_PV[2, 39] = torch.inf
    logits_PV[3] = -torch.inf
    logits_PV[4, :2] = torch.tensor([torch.inf, torch.nan])
    rows = rows_of(logits_PV, k, tail_samples=3)
    assert rows.absent_P.tolist() == [False, True, True, True, True, False]
    assert (rows.token_ids_PK[1:5] == PAD_ID).all()
    assert (rows.logprobs_PK[1:5] == -np.inf).all()
    assert rows.tail_token_ids_PN is not None
    assert clean.tail_token_ids_PN is not None
    assert (rows.tail_token_ids_PN[1:5] == PAD_ID).all()
    for i in (0, 5):
        assert rows.token_ids_PK[i].tolist() == clean.token_ids_PK[i].tolist()
        assert rows.tail_token_ids_PN[i].tolist() == clean.tail_token_ids_PN[i].tolist()
        assert rows.log_tail_mass_P[i] == clean.log_tail_mass_P[i]


def test_the_whole_vocabulary_leaves_no_tail() -> None:
    rows = rows_of(random_logits(5, 33), k=33, tail_samples=2)
    assert (rows.log_tail_mass_P == -np.inf).all()
    assert rows.tail_token_ids_PN is not None
    assert (rows.tail_token_ids_PN == PAD_ID).all()
    np.testing.assert_allclose(np.exp(rows.logprobs_PK.astype(np.float64)).sum(1), 1, atol=1e-6)


def test_numbers_never_leave_their_range() -> None:
    logits_PV = torch.zeros(3, 300)
    logits_PV[0, 5] = 1e4
    logits_PV[1, :16] = 90.0
    logits_PV[2] = -1e30
    rows = rows_of(logits_PV, k=16, tail_samples=4)
    assert not rows.absent_P.any()
    assert (rows.logprobs_PK <= 0).all()
    assert (rows.log_tail_mass_P <= 0).all()
    assert rows.entropy_P is not None
    assert (rows.entropy_P >= 0).all()


def test_draws_are_those_of_float64_prefix_sums() -> None:
    logits_PV = random_logits(200, 20011)
    rows = rows_of(logits_PV, k=16, tail_samples=16)
    expected = [plain_row(z, 16, 16, u).draws for z, u in zip(logits_PV.numpy(), uniforms(200), strict=True)]
    assert rows.tail_token_ids_PN is not None
    assert (rows.tail_token_ids_PN == np.array(expected)).all(1).mean() >= 0.9


@pytest.mark.parametrize("device", DEVICES)
def test_a_draw_on_the_edge_belongs_to_the_next_id(device: str) -> None:
    logits_PV = torch.tensor([[0.0, 5.0, 0.0, 0.0, 0.0]], device=device)
    rows = capture(logits_PV, k=1, tail_samples=2, uniforms_P=np.array([0.5]))
    assert rows.tail_token_ids_PN is not None
    # the targets are 1 and 3, the prefix sums 1 1 2 3 4
    assert rows.tail_token_ids_PN.tolist() == [[2, 4]]


def test_no_position_gives_no_row() -> None:
    rows = rows_of(torch.zeros(0, 9), k=3, tail_samples=2)
    assert (len(rows), rows.k, rows.tail_samples) == (0, 3, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_the_size_of_a_block_changes_nothing(device: str) -> None:
    logits_PV = random_logits(41, 1009).to(device)
    small, large = (rows_of(logits_PV, 16, 16, block_bytes=size) for size in (1, 2**30))
    for name in ("token_ids_PK", "logprobs_PK", "log_tail_mass_P", "logsumexp_P", "entropy_P", "tail_token_ids_PN"):
        np.testing.assert_allclose(getattr(small, name), getattr(large, name), rtol=1e-6)


def test_rows_can_be_cut_and_joined_again() -> None:
    rows = rows_of(random_logits(9, 50), 4, 3)
    joined = Rows.concatenate([rows[:2], rows[2:2], rows[2:]])
    assert (len(rows[:2]), len(joined)) == (2, 9)
    for field in fields(Rows):
        assert getattr(joined, field.name).tobytes() == getattr(rows, field.name).tobytes()


def test_rows_of_different_columns_cannot_be_joined() -> None:
    logits_PV = random_logits(2, 50)
    with pytest.raises(InvalidRows, match="tail_token_ids_PN differ"):
        Rows.concatenate([rows_of(logits_PV, 4, 3), rows_of(logits_PV, 4, 0)])
    with pytest.raises(InvalidRows, match="token_ids_PK differ"):
        Rows.concatenate([rows_of(logits_PV, 4, 3), rows_of(logits_PV, 5, 3)])


def test_the_logits_are_not_written_to() -> None:
    logits_PV = random_logits(4, 50)
    before = logits_PV.clone()
    rows_of(logits_PV, 4, 4)
    assert torch.equal(logits_PV, before)


@pytest.mark.parametrize(("k", "tail_samples"), [(3, 1), (3, 5), (1, 4)])
def test_draws_are_unbiased_over_all_uniforms(k: int, tail_samples: int) -> None:
    """Between two neighbouring breakpoints of u the draws are constant, so the expectation is a finite sum."""
    logits = random_logits(1, 13, scale=2.0, seed=5)
    tail = plain_row(logits[0].numpy(), k, tail_samples, 0.5).tail
    breaks = np.unique(np.concatenate([[0.0, 1.0], np.mod(tail_samples * np.cumsum(tail), 1.0)]))
    # rounding splits some breakpoints in two; no uniform of the format falls between those
    breaks = breaks[np.append(True, np.diff(breaks) > 1e-12)]
    middles, lengths = (breaks[1:] + breaks[:-1]) / 2, np.diff(breaks)
    rows = capture(logits.expand(len(middles), -1), k=k, tail_samples=tail_samples, uniforms_P=middles)
    assert rows.tail_token_ids_PN is not None
    mean = np.zeros(13)
    for draws, length in zip(rows.tail_token_ids_PN, lengths, strict=True):
        mean += length * np.bincount(draws, minlength=13) / tail_samples
    np.testing.assert_allclose(mean, tail, atol=1e-9)


@pytest.mark.parametrize("tail_samples", [1, 16])
def test_pooled_draws_follow_the_tail(tail_samples: int) -> None:
    positions = 3000
    logits = random_logits(1, 400, scale=1.5)
    rows = rows_of(logits.expand(positions, -1), k=8, tail_samples=tail_samples)
    tail = plain_row(logits[0].numpy(), 8, tail_samples, 0.5).tail
    assert rows.tail_token_ids_PN is not None
    counts = np.bincount(rows.tail_token_ids_PN.ravel(), minlength=400).astype(np.float64)
    statistic, limit = chi_square(counts, tail * positions * tail_samples)
    assert statistic < limit
    # the same test sees draws that are off by one id
    assert chi_square(np.roll(counts, 1), tail * positions * tail_samples)[0] > 10 * limit
