"""Supports cut at a least probability: what is cut off belongs to the tail before anything is drawn from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_reference import assert_rows_match, gap_near, plain_row
from hypothesis import given, settings
from hypothesis import strategies as st

from teachercache.format_spec import PAD_ID, Rows, tail_uniforms
from teachercache.service.engines.capture import capture

SHARES = (0.3, 0.03, 1e-3, 1e-6)


def rows_of(logits_PV: torch.Tensor, k: int, tail_samples: int, min_prob: float, block_bytes: int = 2**20) -> Rows:
    u = tail_uniforms(5, b"\x02" * 32, len(logits_PV))
    return capture(logits_PV, k=k, tail_samples=tail_samples, uniforms_P=u, min_prob=min_prob, block_bytes=block_bytes)


def counts(rows: Rows) -> np.ndarray:
    return (rows.token_ids_PK != PAD_ID).sum(1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, float, int]:
    vocab_size = draw(st.integers(1, 40))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    logits_PV = random.normal(size=(draw(st.integers(1, 6)), vocab_size)) * draw(st.sampled_from([0.3, 3.0, 30.0]))
    if draw(st.booleans()):
        logits_PV = logits_PV.round()
    logits_PV[random.random(logits_PV.shape) < draw(st.sampled_from([0.0, 0.5]))] = -np.inf
    logits_PV[:, 0] = 0.5
    logits = torch.from_numpy(logits_PV).float()
    share = draw(st.sampled_from([0.0, 0.999, *SHARES]))
    k, tail_samples = draw(st.integers(1, vocab_size)), draw(st.integers(0, 5))
    return logits, k, tail_samples, gap_near(share, logits) if share else 0.0, draw(st.sampled_from([1, 2**20]))


@settings(deadline=None, max_examples=300)
@given(cases())
def test_every_column_is_what_its_definition_says(case: tuple[torch.Tensor, int, int, float, int]) -> None:
    logits_PV, k, tail_samples, min_prob, block_bytes = case
    rows = rows_of(logits_PV, k, tail_samples, min_prob, block_bytes)
    u = tail_uniforms(5, b"\x02" * 32, len(logits_PV))
    assert_rows_match(rows, logits_PV, u, atol=1e-5, min_prob=min_prob)
    for i, logits in enumerate(logits_PV.numpy()):
        # ties included: the lowest ids
        assert rows.token_ids_PK[i, : counts(rows)[i]].tolist() == plain_row(logits, k, 0, 0.5, min_prob).ids


@pytest.mark.parametrize("tail_samples", [0, 6])
@pytest.mark.parametrize("share", SHARES)
def test_a_cut_row_is_that_of_a_smaller_k(share: float, tail_samples: int) -> None:
    logits_PV = torch.randn(40, 2003, generator=torch.Generator().manual_seed(1)) * 3
    min_prob = gap_near(share, logits_PV)
    rows = rows_of(logits_PV, 50, tail_samples, min_prob)
    assert len(set(counts(rows).tolist())) > 1 or share == 1e-6
    for i, count in enumerate(counts(rows).tolist()):
        u = tail_uniforms(5, b"\x02" * 32, 40)[i : i + 1]
        plain = capture(logits_PV[i : i + 1], k=count, tail_samples=tail_samples, uniforms_P=u)
        assert rows.token_ids_PK[i, :count].tolist() == plain.token_ids_PK[0].tolist()
        for name in ("logsumexp_P", "entropy_P", "log_tail_mass_P"):
            np.testing.assert_allclose(getattr(rows, name)[i], getattr(plain, name)[0], rtol=1e-6)
        np.testing.assert_allclose(rows.logprobs_PK[i, :count], plain.logprobs_PK[0], rtol=1e-6)
        if rows.tail_token_ids_PN is not None and plain.tail_token_ids_PN is not None:
            assert rows.tail_token_ids_PN[i].tolist() == plain.tail_token_ids_PN[0].tolist()


@pytest.mark.parametrize(("k", "kept"), [(8, 8), (5, 5), (1, 1)])
def test_entries_of_exactly_the_threshold_stay_all_or_as_many_as_k(k: int, kept: int) -> None:
    logits_PV = torch.full((3, 11), -torch.inf)
    logits_PV[:, 2:10] = torch.tensor([[0.0], [7.0], [-40.0]])
    rows = rows_of(logits_PV, k, 4, 0.125)
    assert rows.token_ids_PK.tolist() == [[*range(2, 2 + kept)]] * 3
    above = rows_of(logits_PV, k, 4, float(np.nextafter(0.125, 1)))
    assert above.token_ids_PK.tolist() == [[2] + [PAD_ID] * (k - 1)] * 3
    np.testing.assert_allclose(above.log_tail_mass_P, np.log(7 / 8), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 4, 300])
def test_a_threshold_above_every_probability_keeps_the_most_probable(k: int) -> None:
    logits_PV = torch.randn(30, 300, generator=torch.Generator().manual_seed(2))
    rows = rows_of(logits_PV, k, 4, 1.0)
    p_PV = logits_PV.double().softmax(1)
    assert (counts(rows) == 1).all()
    assert rows.token_ids_PK[:, 0].tolist() == p_PV.argmax(1).tolist()
    np.testing.assert_allclose(rows.log_tail_mass_P, torch.log1p(-p_PV.amax(1)).numpy(), rtol=1e-6)
    assert rows.tail_token_ids_PN is not None and (rows.tail_token_ids_PN >= 0).all()


def test_a_cut_gives_a_tail_to_a_row_that_had_none_however_small() -> None:
    none = -torch.inf
    logits_PV = torch.tensor([[1e4, 0.0, 0.0, -1e4], [50.0, -50.0, none, none], [1e4, 0.0, none, 0.0]])
    assert (rows_of(logits_PV, 4, 2, 0.0).log_tail_mass_P == -np.inf).all()
    for k in (3, 4):
        rows = rows_of(logits_PV, k, 2, 1e-9)
        assert rows.token_ids_PK.tolist() == [[0] + [PAD_ID] * (k - 1)] * 3
        np.testing.assert_allclose(rows.log_tail_mass_P, [np.log(2) - 1e4, -100.0, np.log(2) - 1e4], rtol=1e-6)
        assert rows.tail_token_ids_PN is not None
        assert rows.tail_token_ids_PN.tolist() == [[1, 2], [1, 1], [1, 3]]


def test_unusable_positions_stay_absent() -> None:
    logits_PV = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    logits_PV[1, 7] = torch.nan
    rows = rows_of(logits_PV, 8, 3, 0.03)
    assert rows.absent_P.tolist() == [False, True, False]
    assert rows.tail_token_ids_PN is not None and (rows.tail_token_ids_PN[1] == PAD_ID).all()
    assert np.isnan(rows.log_tail_mass_P[1]) and (rows.logprobs_PK[1] == -np.inf).all()


@pytest.mark.parametrize("min_prob", [0.0, 0.02, 0.1, 1.0])
@pytest.mark.parametrize("tail_samples", [1, 4])
def test_support_and_draws_are_the_distribution_in_expectation(min_prob: float, tail_samples: int) -> None:
    """Between two neighbouring breakpoints of u the draws are constant, so the expectation is a finite sum."""
    logits = torch.randn(1, 17, generator=torch.Generator().manual_seed(4)) * 2
    tail = plain_row(logits[0].numpy(), 6, tail_samples, 0.5, min_prob).tail
    breaks = np.unique(np.concatenate([[0.0, 1.0], np.mod(tail_samples * np.cumsum(tail), 1.0)]))
    # rounding splits some breakpoints in two; no uniform of the format falls between those
    breaks = breaks[np.append(True, np.diff(breaks) > 1e-12)]
    middles, lengths = (breaks[1:] + breaks[:-1]) / 2, np.diff(breaks)
    rows = capture(
        logits.expand(len(middles), -1), k=6, tail_samples=tail_samples, uniforms_P=middles, min_prob=min_prob
    )
    mean = np.zeros(17)
    assert rows.tail_token_ids_PN is not None
    for i, length in enumerate(lengths):
        kept = rows.token_ids_PK[i][: counts(rows)[i]]
        mean[kept] += length * np.exp(rows.logprobs_PK[i, : len(kept)].astype(np.float64))
        share = np.exp(float(rows.log_tail_mass_P[i])) / tail_samples
        mean += length * share * np.bincount(rows.tail_token_ids_PN[i], minlength=17)
    np.testing.assert_allclose(mean, logits[0].double().softmax(0).numpy(), atol=1e-7)
