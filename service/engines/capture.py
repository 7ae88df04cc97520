"""Rows from logits: exact top k, tail mass, entropy and tail samples.

Shapes: P positions, V vocabulary, K kept entries (at most V), N tail samples, B positions of a block,
H = min(K + 1, V): the support's values and the largest value off it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...format_spec import PAD_ID, Rows
from .capture_columns import Columns

# a CPU is fastest while a block stays in its caches, a GPU while there are few launches
CPU_BLOCK_BYTES_PER_THREAD = 2 * 2**20
GPU_BLOCK_BYTES = 2**30
# exp of it is exactly 0 in float64 and, unlike that of -inf, 0 times it is 0
_WEIGHTLESS = -800.0
# above it a kernel would read most of the vocabulary again
MAX_KERNEL_K = 512


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return find_spec("triton") is not None


def capture(logits_PV: Tensor, **how: Any) -> Rows:
    """Return the rows of raw logits, in memory; see `capture_columns`."""
    return capture_columns(logits_PV, **how).to_rows()


def capture_columns(
    logits_PV: Tensor,
    *,
    k: int,
    tail_samples: int,
    uniforms_P: npt.NDArray[np.float64],
    min_prob: float = 0.0,
    block_bytes: int | None = None,
) -> Columns:
    """Return the rows of raw logits, over the whole vocabulary and at temperature 1.

    Ties go to the lowest ids. Entries of the top k less probable than `min_prob`, but for the first, belong to the
    tail, which is drawn from after that. Entries of -inf enter neither the support nor the draws. A position with
    NaN, +inf or nothing but -inf becomes an absent row. `block_bytes` bounds each float64 temporary.
    """
    if logits_PV.is_cuda and has_triton() and k <= MAX_KERNEL_K:
        from .capture_kernel import columns_of

        return columns_of(logits_PV, k=k, tail_samples=tail_samples, uniforms_P=uniforms_P, min_prob=min_prob)
    if block_bytes is None:
        block_bytes = GPU_BLOCK_BYTES if logits_PV.is_cuda else CPU_BLOCK_BYTES_PER_THREAD * torch.get_num_threads()
    size = max(1, block_bytes // (8 * logits_PV.shape[1]))
    return Columns.concatenate(
        [
            _capture_block(logits_PV[start : start + size], k, tail_samples, min_prob, uniforms_P[start : start + size])
            for start in range(0, max(len(logits_PV), 1), size)
        ]
    )


def _capture_block(
    logits_BV: Tensor, k: int, tail_samples: int, min_prob: float, uniforms_B: npt.NDArray[np.float64]
) -> Columns:
    logits_BV = logits_BV.float()
    top_BH, top_ids_BH = logits_BV.topk(min(k + 1, logits_BV.shape[1]))
    # NaN ranks above +inf, so the first value tells
    absent_B1 = ~top_BH[:, :1].isfinite()
    if absent_B1.any():
        logits_BV, top_BH = logits_BV.masked_fill(absent_B1, 0.0), top_BH.masked_fill(absent_B1, 0.0)
    ids_BK, values_BK = _support(logits_BV, top_BH, top_ids_BH, k)

    first_off_B1 = top_BH[:, k:] if top_BH.shape[1] > k else torch.full_like(top_BH[:, :1], -torch.inf)
    no_tail_B1 = first_off_B1.isneginf()
    shift_B1 = torch.where(no_tail_B1, top_BH[:, :1], first_off_B1).double()
    exponents_BV = logits_BV.double().sub_(shift_B1).scatter_(1, ids_BK, _WEIGHTLESS).clamp_(min=_WEIGHTLESS)
    weights_BV = exponents_BV.exp()
    total_B1 = weights_BV.sum(1, keepdim=True)

    log_tail_B1 = shift_B1 + total_B1.log()
    lse_B1 = torch.logaddexp(values_BK.double().logsumexp(1, keepdim=True), log_tail_B1)
    logprobs_BK = values_BK.double() - lse_B1
    # -sum of p log p: over the support, then off it, where log p = exponent + shift - lse
    cross_B1 = torch.linalg.vecdot(weights_BV, exponents_BV)[:, None]
    off_B1 = (shift_B1 - lse_B1).exp() * (cross_B1 + total_B1 * (shift_B1 - lse_B1))
    entropy_B1 = torch.special.entr(logprobs_BK.exp()).sum(1, keepdim=True) - off_B1

    if min_prob > 0:
        cut_BK = _improbable(values_BK, total_B1, shift_B1, min_prob)
        moved_BK = values_BK.double().masked_fill(~cut_BK, -torch.inf)
        _add_to_tail(weights_BV, shift_B1, ids_BK, moved_BK)
        log_tail_B1 = torch.logaddexp(log_tail_B1, moved_BK.logsumexp(1, keepdim=True))
        no_tail_B1 = log_tail_B1.isneginf()
        values_BK, logprobs_BK = (column.masked_fill(cut_BK, -torch.inf) for column in (values_BK, logprobs_BK))

    draws_BN = _draw(weights_BV, uniforms_B, tail_samples) if tail_samples else None
    return Columns(
        token_ids_PK=ids_BK.masked_fill(absent_B1 | values_BK.isneginf(), PAD_ID).int(),
        logprobs_PK=logprobs_BK.masked_fill(absent_B1, -torch.inf).float(),
        log_tail_mass_P=(log_tail_B1 - lse_B1).masked_fill(absent_B1, torch.nan)[:, 0].float(),
        logsumexp_P=lse_B1.masked_fill(absent_B1, torch.nan)[:, 0].float(),
        entropy_P=entropy_B1.masked_fill(absent_B1, torch.nan)[:, 0].float(),
        tail_token_ids_PN=None if draws_BN is None else draws_BN.masked_fill(absent_B1 | no_tail_B1, PAD_ID).int(),
    )


def _support(logits_BV: Tensor, top_BH: Tensor, top_ids_BH: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the top k: values descending, equal ones by id ascending."""
    ids_BK = top_ids_BH[:, :k].sort(1).values
    if top_BH.shape[1] > k:
        # where the k-th value is also the next one, topk took any of the ids that share it
        tied_B = top_BH[:, k - 1] == top_BH[:, k]
        if tied_B.any():
            ids_BK[tied_B] = _lowest_ids(logits_BV[tied_B], top_BH[tied_B, k - 1 : k], k)
    values_BK, order_BK = logits_BV.gather(1, ids_BK).sort(dim=1, descending=True, stable=True)
    return ids_BK.gather(1, order_BK), values_BK


def _lowest_ids(logits_BV: Tensor, kth_B1: Tensor, k: int) -> Tensor:
    """Return the ids of the top k, ascending, filled up with the lowest ids that have exactly the k-th value."""
    above_BV, equal_BV = logits_BV > kth_B1, logits_BV == kth_B1
    room_B1 = k - above_BV.sum(1, keepdim=True)
    kept_BV = above_BV | (equal_BV & (equal_BV.cumsum(1, dtype=torch.int32) <= room_B1))
    return kept_BV.nonzero()[:, 1].reshape(-1, k)


def _improbable(values_BK: Tensor, total_B1: Tensor, shift_B1: Tensor, min_prob: float) -> Tensor:
    """Tell which entries have a probability below `min_prob`; never the first of a row."""
    top_B1 = values_BK[:, :1].double()
    parts_BK = (values_BK.double() - top_B1).exp()
    whole_B1 = parts_BK.sum(1, keepdim=True) + total_B1 * (shift_B1 - top_B1).exp()
    cut_BK = parts_BK / whole_B1 < min_prob
    cut_BK[:, 0] = False
    return cut_BK


def _add_to_tail(weights_BV: Tensor, shift_B1: Tensor, ids_BK: Tensor, moved_BK: Tensor) -> None:
    """Give the ids whose values are finite in `moved_BK` their weights; the largest of a row becomes 1."""
    first_B1 = moved_BK.amax(1, keepdim=True)
    first_B1 = torch.where(first_B1.isneginf(), shift_B1, first_B1)
    # where there was no tail, the shift is above all values and the weights are 0
    weights_BV.mul_((shift_B1 - first_B1).clamp_(max=0).exp_())
    weights_BV.scatter_(1, ids_BK, (moved_BK - first_B1).exp_())


def _draw(weights_BV: Tensor, uniforms_B: npt.NDArray[np.float64], tail_samples: int) -> Tensor:
    """Return systematic samples, ascending: draw j is the first id v with C_v > (u + j) / N * C_V.

    C are the prefix sums of the weights in id order, in float64: in float32 many ids get no width at all.
    They overwrite the weights.
    """
    sums_BV = weights_BV.cumsum_(1)
    uniforms_B1 = torch.from_numpy(uniforms_B).to(weights_BV.device)[:, None]
    steps_N = torch.arange(tail_samples, device=weights_BV.device, dtype=torch.float64)
    return torch.searchsorted(sums_BV, (uniforms_B1 + steps_N) / tail_samples * sums_BV[:, -1:], right=True)
