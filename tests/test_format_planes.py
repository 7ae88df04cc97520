"""The compressed planes of a writer: small for what planes are, noise and runs."""

from __future__ import annotations

import numpy as np
import pytest

from teachercache.format_spec.planes import PlaneDecoder, PlaneEncoder


def entropy_bytes(plane: np.ndarray) -> float:
    counts = np.bincount(plane)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.4])
def test_noise_costs_little_more_than_its_entropy(share: float) -> None:
    """Differences of sorted logprobs look like this; short matches in them would cost 20 percent."""
    plane = (np.random.default_rng(0).geometric(share, 51_100) - 1).astype(np.uint8)
    (stream,) = PlaneEncoder().encode(plane, 1)
    assert len(stream) < 1.08 * entropy_bytes(plane)
    assert (PlaneDecoder().decode([stream], len(plane), np.uint8) == plane).all()


def test_the_padding_of_short_rows_costs_next_to_nothing() -> None:
    codes = np.full((511, 100), 0xFFFFFF, np.uint32)
    codes[:, 0] = np.random.default_rng(0).integers(0, 200, 511)
    assert sum(map(len, PlaneEncoder().encode(codes, 3))) < 4 * 511
