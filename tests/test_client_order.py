"""The order of a stream: complete, even over ranks, and the same however it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teachercache.client import ConfigError
from teachercache.client.order import Plan, epoch_order

sizes = st.integers(1, 60)
batch_sizes = st.integers(1, 9)
world_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**64 - 1)


def ranks(num_sequences: int, batch_size: int, world_size: int, **settings: Any) -> list[Plan]:
    plans = [Plan(num_sequences, batch_size, rank=r, world_size=world_size, **settings) for r in range(world_size)]
    assert [plan.rank for plan in plans] == list(range(world_size))
    return plans


def consumed(plans: list[Plan], cursor: int = 0) -> list[tuple[int, int]]:
    """The (epoch, sequence) pairs in global order, put together from what the ranks get."""
    pairs = []
    for steps in zip(*(plan.steps(cursor) for plan in plans), strict=True):
        merged = np.full(len(steps[0].taken), -1)
        for rank, step in enumerate(steps):
            merged[rank :: len(plans)] = step.numbers
        assert all(step.cursor == steps[0].cursor for step in steps)
        assert (merged == steps[0].taken).all()
        pairs += [(steps[0].epoch, int(number)) for number in merged]
    return pairs


@given(sizes, batch_sizes, world_sizes, seeds, st.integers(0, 3), st.booleans())
def test_every_sequence_once_an_epoch(
    n: int, batch_size: int, world_size: int, seed: int, epochs: int, shuffle: bool
) -> None:
    pairs = consumed(ranks(n, batch_size, world_size, seed=seed, epochs=epochs, shuffle=shuffle))
    assert len(pairs) == n * epochs
    for epoch in range(epochs):
        assert sorted(number for e, number in pairs if e == epoch) == list(range(n))
    assert shuffle or pairs == [(epoch, number) for epoch in range(epochs) for number in range(n)]


@given(sizes, batch_sizes, world_sizes, batch_sizes, world_sizes, seeds)
def test_order_depends_on_seed_alone(n: int, b: int, w: int, other_b: int, other_w: int, seed: int) -> None:
    assert consumed(ranks(n, b, w, seed=seed, epochs=2)) == consumed(ranks(n, other_b, other_w, seed=seed, epochs=2))


@given(sizes, batch_sizes, world_sizes, world_sizes, seeds, st.data())
def test_resume_at_any_cursor(n: int, b: int, w: int, other_w: int, seed: int, data: st.DataObject) -> None:
    """Any number of ranks goes on where others stopped, also between their steps."""
    cursor = data.draw(st.integers(0, 3 * n))
    whole = consumed(ranks(n, b, w, seed=seed, epochs=3))
    assert consumed(ranks(n, b, other_w, seed=seed, epochs=3), cursor) == whole[cursor:]


@given(sizes, batch_sizes, world_sizes, st.integers(0, 3), st.data())
def test_ranks_make_equally_many_steps(n: int, b: int, w: int, epochs: int, data: st.DataObject) -> None:
    cursor = data.draw(st.integers(0, n * epochs))
    for plan in ranks(n, b, w, epochs=epochs):
        steps = list(plan.steps(cursor))
        assert len(steps) == plan.num_steps(cursor)
        assert all(len(step.numbers) <= b for step in steps)


def test_shuffle_is_pinned() -> None:
    """A change here makes every saved cursor mean something else."""
    assert epoch_order(0, 0, 8).tolist() == [4, 2, 1, 5, 7, 3, 6, 0]
    assert epoch_order(7, 3, 8).tolist() == [0, 3, 4, 5, 2, 6, 7, 1]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_no_end() -> None:
    plan = Plan(3, 2, epochs=None)
    steps = plan.steps(0)
    assert [next(steps).epoch for _ in range(7)] == [0, 0, 1, 1, 2, 2, 3]
    assert plan.num_steps(0) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("seed", -1), ("seed", 2**64), ("epochs", -1), ("world_size", 0), ("rank", 2), ("rank", -1)],
)
def test_bad_argument_is_named(name: str, value: int) -> None:
    settings: dict[str, Any] = {"batch_size": 1, "world_size": 2} | {name: value}
    with pytest.raises(ConfigError, match=f"{name} must be .* not {value}"):
        Plan(10, **settings)


@pytest.mark.parametrize("cursor", [-1, 21])
def test_cursor_outside_is_refused(cursor: int) -> None:
    with pytest.raises(ConfigError, match="0 to 20"):
        Plan(10, 1, epochs=2).check_cursor(cursor)
