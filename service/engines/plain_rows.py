"""Rows of what an API gives: the top k, and nothing of the rest.

Shapes: P positions, K kept entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...format_spec import PAD_ID, Rows


def plain_rows(token_ids_PK: npt.NDArray[np.int32], logprobs_PK: npt.NDArray[np.float32], min_prob: float) -> Rows:
    """Return rows of top-k logprobs alone, whose tail is what they leave of 1: right to some 1e-7 of the whole.

    Equal logprobs are put in the order of their ids; which ids of those equal to the last one are in, the engine chose.
    """
    order_PK = np.lexsort((token_ids_PK, -logprobs_PK), axis=1)
    token_ids_PK = np.take_along_axis(token_ids_PK, order_PK, 1)
    logprobs_PK = np.take_along_axis(logprobs_PK, order_PK, 1)
    absent_P1 = ~np.isfinite(logprobs_PK[:, :1])
    cut_PK = np.isneginf(logprobs_PK)
    if min_prob > 0:
        cut_PK |= np.exp(logprobs_PK.astype(np.float64)) < min_prob
        cut_PK[:, 0] = False
    cut_PK |= absent_P1
    token_ids_PK = np.where(cut_PK, np.int32(PAD_ID), token_ids_PK)
    logprobs_PK = np.where(cut_PK, np.float32(-np.inf), logprobs_PK)
    mass_P = np.exp(logprobs_PK.astype(np.float64)).sum(1)
    with np.errstate(divide="ignore"):
        log_tail_P = np.log(np.clip(1.0 - mass_P, 0.0, None)).astype(np.float32)
    log_tail_P[absent_P1[:, 0]] = np.nan
    return Rows(token_ids_PK, logprobs_PK, log_tail_P)
