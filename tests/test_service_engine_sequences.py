"""Batches hold every sequence once and stay within their bound."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from teachercache.service.engines.sequences import pad_batch, plan_batches


@given(st.lists(st.integers(2, 50), max_size=40), st.integers(1, 200))
def test_batches_are_bounded_and_cover_the_list(lengths: list[int], max_tokens: int) -> None:
    batches = list(plan_batches(lengths, max_tokens))
    flat = [index for batch in batches for index in batch]
    assert flat == sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch[-1]] <= max_tokens
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * lengths[following[0]] > max_tokens


def test_padding_is_on_the_right_and_masked() -> None:
    ids, mask = pad_batch([np.array([5, 6], dtype=np.int32), np.array([7, 8, 9], dtype=np.int64)])
    assert ids.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
