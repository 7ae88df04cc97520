"""Supports made of entries that others wrote: ordered, cut at impossible tokens, and the mass they leave out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidRows
from .rows import PAD_ID, Float32, Int32

Floats = npt.NDArray[np.floating[Any]]

# logprobs in bf16 may add up to this much more than 1 where a row's entropy is 10 nats
MASS_SLACK = 0.02


def ranked(token_ids_PK: npt.NDArray[np.integer[Any]], logprobs_PK: Floats) -> tuple[Int32, Floats]:
    """Return the rows most probable first, equals in the order given.

    An entry of logprob -inf is no entry. A row that holds NaN or +inf is absent.

    Raises:
        InvalidRows: an entry has a negative id.
    """
    useless_P = (np.isnan(logprobs_PK) | (logprobs_PK == np.inf)).any(axis=1)
    logprobs_PK = np.where(useless_P[:, None], -np.inf, logprobs_PK)
    order_PK = np.argsort(-logprobs_PK, axis=1, kind="stable")
    logprobs_PK = np.take_along_axis(logprobs_PK, order_PK, axis=1)
    ids_PK = np.take_along_axis(token_ids_PK, order_PK, axis=1)
    padding_PK = logprobs_PK == -np.inf
    if (ids_PK[~padding_PK] < 0).any():
        raise InvalidRows(f"an entry has the id {ids_PK[~padding_PK].min()}")
    return np.where(padding_PK, PAD_ID, ids_PK).astype(np.int32), logprobs_PK


def log_tail_mass(logprobs_PK: Floats, *, slack: float = MASS_SLACK) -> Float32:
    """Return the log of the mass that the entries leave out: NaN for an absent row, -inf from a mass of 1 on.

    What the entries lost by rounding is lost here as a whole: a tail near or below that error is noise. From bf16
    logprobs the error is 4e-4 (median), and 1 confident row in 10 comes out without a tail; from fp16 4e-5, and 1 in
    100.

    Raises:
        InvalidRows: entries add up to more than 1 and the slack, so they are no logprobs.
    """
    mass_P = np.exp(logprobs_PK.astype(np.float64)).sum(axis=1)
    if (mass_P > 1 + slack).any():
        raise InvalidRows(f"probabilities of a row add up to {mass_P.max():.4f}: not logprobs at temperature 1")
    with np.errstate(divide="ignore"):
        tail_P = np.log1p(-np.minimum(mass_P, 1.0))
    return np.where(mass_P > 0, tail_P, np.nan).astype(np.float32)
