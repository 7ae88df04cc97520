"""Rows from logits on a GPU, reading the logits once: `capture_columns` where Triton runs.

The vocabulary is seen in blocks of `BLOCK` ids. One pass gives each block's maximum and sums. By the order of the rows
(value descending, id ascending) an entry of the top k lies in one of the first k blocks in the order (maximum
descending, number ascending): otherwise k blocks, and with them k entries, come before it. So only those are read
again, and of the others only the blocks that a draw falls into.

Shapes: P positions, V vocabulary, K kept entries, N tail samples, B ids of a block, S blocks that are read again,
X blocks of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...format_spec import PAD_ID
from .capture_columns import Columns

BLOCK = 128
# blocks a program takes at a time: of the first pass, of the second
PASS, AGAIN = 32, 8


@triton.jit
def _sums(logits_ptr, top_ptr, sum_ptr, cross_ptr, V, X, stride, B: tl.constexpr, R: tl.constexpr):
    """Of each block: its maximum m, the sum of e = exp(z - m), and that of e (z - m); NaN where z is NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    blocks_R = tl.program_id(1) * R + tl.arange(0, R)
    ids_RB = blocks_R[:, None] * B + tl.arange(0, B)[None, :]
    z_RB = tl.load(logits_ptr + row * stride + ids_RB, mask=ids_RB < V, other=float("-inf")).to(tl.float32)
    top_R, sum_R, cross_R = _block(z_RB)
    place_R = row * X + blocks_R
    tl.store(top_ptr + place_R, top_R, mask=blocks_R < X)
    tl.store(sum_ptr + place_R, sum_R, mask=blocks_R < X)
    tl.store(cross_ptr + place_R, cross_R, mask=blocks_R < X)


@triton.jit
def _block(z_RB):
    top_R = tl.max(z_RB, 1)
    over_RB = z_RB - tl.where(top_R == float("-inf"), 0.0, top_R)[:, None]
    e_RB = tl.exp(over_RB)
    cross_R = tl.sum(tl.where(z_RB == float("-inf"), 0.0, e_RB * over_RB), 1)
    # a maximum need not show them
    wrong_R = tl.max(((z_RB != z_RB) | (z_RB == float("inf"))).to(tl.int32), 1)
    return top_R, tl.where(wrong_R > 0, float("nan"), tl.sum(e_RB, 1)), cross_R


@triton.jit
def _gather(logits_ptr, blocks_ptr, out_ptr, V, S, stride, B: tl.constexpr, G: tl.constexpr):
    """Copy blocks side by side, -inf beyond the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    number_G = tl.program_id(1) * G + tl.arange(0, G)
    lanes_B = tl.arange(0, B)[None, :]
    blocks_G = tl.load(blocks_ptr + row * S + number_G, mask=number_G < S, other=V)
    ids_GB = blocks_G[:, None] * B + lanes_B
    z_GB = tl.load(logits_ptr + row * stride + ids_GB, mask=ids_GB < V, other=float("-inf"))
    tl.store(out_ptr + (row * S + number_G[:, None]) * B + lanes_B, z_GB, mask=number_G[:, None] < S)


@triton.jit
def _select(
    logits_ptr, blocks_ptr, kth_ptr, room_ptr, ids_ptr, values_ptr, top_ptr, sum_ptr, cross_ptr,
    V, X, K, S, stride, B: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Write the support, by id, and take it out of its blocks' maxima and sums.

    It is all above the k-th value, and of those equal to it as many as there is room for, from the lowest id on.
    """
    row = tl.program_id(0).to(tl.int64)
    kth, room = tl.load(kth_ptr + row), tl.load(room_ptr + row)
    filled, equals = 0, 0
    for first in range(0, S, G):
        number_G = first + tl.arange(0, G)
        blocks_G = tl.load(blocks_ptr + row * S + number_G, mask=number_G < S, other=X)
        ids_GB = blocks_G[:, None] * B + tl.arange(0, B)[None, :]
        z_GB = tl.load(logits_ptr + row * stride + ids_GB, mask=ids_GB < V, other=float("-inf")).to(tl.float32)
        z_C, ids_C = tl.reshape(z_GB, (G * B,)), tl.reshape(ids_GB, (G * B,))
        equal_C = ((z_C == kth) & (ids_C < V)).to(tl.int32)
        keep_C = ((z_C > kth) | ((equal_C > 0) & (equals + tl.cumsum(equal_C, 0) <= room))).to(tl.int32)
        place_C = row * K + filled + tl.cumsum(keep_C, 0) - 1
        # never more than k, but where NaN has made nonsense of the k-th value
        inside_C = (keep_C > 0) & (place_C < row * K + K)
        tl.store(ids_ptr + place_C, ids_C, mask=inside_C)
        tl.store(values_ptr + place_C, z_C, mask=inside_C)
        filled += tl.sum(keep_C, 0)
        equals += tl.sum(equal_C, 0)
        rest_GB = tl.reshape(tl.where(keep_C > 0, float("-inf"), z_C), (G, B))
        top_G, sum_G, cross_G = _block(rest_GB)
        place_G = row * X + blocks_G
        tl.store(top_ptr + place_G, top_G, mask=blocks_G < X)
        tl.store(sum_ptr + place_G, sum_G, mask=blocks_G < X)
        tl.store(cross_ptr + place_G, cross_G, mask=blocks_G < X)


@triton.jit
def _draw(
    logits_ptr, blocks_ptr, rest_ptr, shift_ptr, support_ptr, draws_ptr,
    V, K, N, stride, B: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """In the block that a draw falls into, the first id whose prefix sum, off the support, exceeds the rest."""
    row = tl.program_id(0).to(tl.int64)
    draw = row * N + tl.program_id(1)
    block, rest = tl.load(blocks_ptr + draw), tl.load(rest_ptr + draw)
    lanes_B = tl.arange(0, B)
    ids_B = block.to(tl.int32) * B + lanes_B
    z_B = tl.load(logits_ptr + row * stride + ids_B, mask=ids_B < V, other=float("-inf")).to(tl.float64)
    number_K = tl.arange(0, KP)
    support_K = tl.load(support_ptr + row * K + number_K, mask=number_K < K, other=-1)
    taken_B = tl.max((ids_B[:, None] == support_K[None, :]).to(tl.int32), 1)
    weight_B = tl.where((taken_B > 0) | (z_B == float("-inf")), 0.0, tl.exp(z_B - tl.load(shift_ptr + row)))
    before = tl.sum((tl.cumsum(weight_B, 0) <= rest).to(tl.int32), 0)
    # the block's mass was summed in another order, and may be larger by a rounding
    last = tl.max(tl.where(weight_B > 0, lanes_B, 0), 0)
    tl.store(draws_ptr + draw, block.to(tl.int32) * B + tl.minimum(before, last))


def columns_of(
    logits_PV: Tensor, *, k: int, tail_samples: int, uniforms_P: npt.NDArray[np.float64], min_prob: float
) -> Columns:
    """Return what `capture_columns` does; logits of any float dtype, with consecutive ids side by side."""
    if logits_PV.stride(1) != 1:
        logits_PV = logits_PV.contiguous()
    positions, vocab = logits_PV.shape
    blocks = triton.cdiv(vocab, BLOCK)
    top_PX, sum_PX, cross_PX = (logits_PV.new_empty(positions, blocks, dtype=torch.float32) for _ in range(3))
    stride = logits_PV.stride(0)
    if positions:
        grid = (positions, triton.cdiv(blocks, PASS))
        _sums[grid](logits_PV, top_PX, sum_PX, cross_PX, vocab, blocks, stride, B=BLOCK, R=PASS)
    absent_P1 = sum_PX.isnan().any(1, keepdim=True) | ~top_PX.amax(1, keepdim=True).isfinite()
    ids_PK, values_PK = _support(logits_PV, top_PX, sum_PX, cross_PX, k)

    shift_P1 = top_PX.amax(1, keepdim=True).double()
    no_tail_P1 = shift_P1.isneginf()
    shift_P1 = torch.where(no_tail_P1, values_PK[:, :1].double(), shift_P1)
    scale_PX = (top_PX.double() - shift_P1).exp_()
    mass_PX = scale_PX * sum_PX
    total_P1 = mass_PX.sum(1, keepdim=True)
    log_tail_P1 = shift_P1 + total_P1.log()
    lse_P1 = torch.logaddexp(values_PK.double().logsumexp(1, keepdim=True), log_tail_P1)
    logprobs_PK = values_PK.double() - lse_P1
    # -sum of p log p off the support, where log p = (z - m) + (m - lse), and m is the block's maximum
    over_PX = (top_PX.double() - lse_P1).masked_fill_(top_PX.isneginf(), 0.0)
    off_P1 = (shift_P1 - lse_P1).exp() * (scale_PX * cross_PX + mass_PX * over_PX).sum(1, keepdim=True)
    entropy_P1 = torch.special.entr(logprobs_PK.exp()).sum(1, keepdim=True) - off_P1

    if min_prob > 0:
        cut_PK = logprobs_PK.exp() < min_prob
        cut_PK[:, 0] = False
        moved_PK = values_PK.double().masked_fill(~cut_PK, -torch.inf)
        log_tail_P1 = torch.logaddexp(log_tail_P1, moved_PK.logsumexp(1, keepdim=True))
        largest_P1 = torch.maximum(torch.where(no_tail_P1, -torch.inf, shift_P1), moved_PK.amax(1, keepdim=True))
        no_tail_P1 = log_tail_P1.isneginf()
        largest_P1 = torch.where(no_tail_P1, shift_P1, largest_P1)
        mass_PX *= (shift_P1 - largest_P1).clamp_(max=0).exp_()
        mass_PX.scatter_add_(1, ids_PK.long() // BLOCK, (moved_PK - largest_P1).exp_())
        shift_P1 = largest_P1
        values_PK, logprobs_PK = (column.masked_fill(cut_PK, -torch.inf) for column in (values_PK, logprobs_PK))

    ids_PK = ids_PK.masked_fill(absent_P1 | values_PK.isneginf(), PAD_ID)
    draws_PN = None
    if tail_samples:
        draws_PN = _draws(logits_PV, mass_PX, shift_P1, ids_PK, uniforms_P, tail_samples)
        draws_PN.masked_fill_(absent_P1 | no_tail_P1, PAD_ID)
    return Columns(
        token_ids_PK=ids_PK,
        logprobs_PK=logprobs_PK.masked_fill(absent_P1, -torch.inf).float(),
        log_tail_mass_P=(log_tail_P1 - lse_P1).masked_fill(absent_P1, torch.nan)[:, 0].float(),
        logsumexp_P=lse_P1.masked_fill(absent_P1, torch.nan)[:, 0].float(),
        entropy_P=entropy_P1.masked_fill(absent_P1, torch.nan)[:, 0].float(),
        tail_token_ids_PN=draws_PN,
    )


def _support(logits_PV: Tensor, top_PX: Tensor, sum_PX: Tensor, cross_PX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the top k in their order, and take them out of the blocks."""
    (positions, vocab), blocks = logits_PV.shape, top_PX.shape[1]
    selected_PS = _first_blocks(top_PX, min(k, blocks)).int().sort(1).values
    count = selected_PS.shape[1]
    candidates_PC = logits_PV.new_empty(positions, count * BLOCK)
    if positions:
        grid = (positions, triton.cdiv(count, AGAIN))
        _gather[grid](logits_PV, selected_PS, candidates_PC, vocab, count, logits_PV.stride(0), B=BLOCK, G=AGAIN)
    top_PK = candidates_PC.topk(k, 1).values.float()
    kth_P1 = top_PK[:, -1:].contiguous()
    room_P1 = k - (top_PK > kth_P1).sum(1, keepdim=True, dtype=torch.int32)
    ids_PK = torch.zeros(positions, k, dtype=torch.int32, device=logits_PV.device)
    values_PK = torch.full((positions, k), -torch.inf, device=logits_PV.device)
    if positions:
        _select[(positions,)](
            logits_PV, selected_PS, kth_P1, room_P1, ids_PK, values_PK, top_PX, sum_PX, cross_PX,
            vocab, blocks, k, count, logits_PV.stride(0), B=BLOCK, G=AGAIN,
        )  # fmt: skip
    values_PK, order_PK = values_PK.sort(dim=1, descending=True, stable=True)
    return ids_PK.gather(1, order_PK), values_PK


def _first_blocks(top_PX: Tensor, count: int) -> Tensor:
    """Return the numbers of the first blocks by maximum descending, number ascending."""
    # as integers, floats are in their order, the negative ones backwards
    bits_PX = top_PX.view(torch.int32).long()
    keys_PX = torch.where(bits_PX < 0, -(bits_PX & 0x7FFFFFFF), bits_PX) * 2**20
    keys_PX -= torch.arange(top_PX.shape[1], device=top_PX.device)
    return keys_PX.topk(count, 1, sorted=False).indices


def _draws(
    logits_PV: Tensor,
    mass_PX: Tensor,
    shift_P1: Tensor,
    support_PK: Tensor,
    uniforms_P: npt.NDArray[np.float64],
    tail_samples: int,
) -> Tensor:
    """Return systematic samples, ascending: draw j is the first id v with C_v > (u + j) / N * C_V."""
    positions, vocab = logits_PV.shape
    sums_PX = mass_PX.cumsum(1)
    uniforms_P1 = torch.from_numpy(uniforms_P).to(logits_PV.device)[:, None]
    steps_N = torch.arange(tail_samples, device=logits_PV.device, dtype=torch.float64)
    place_PN = (uniforms_P1 + steps_N) / tail_samples * sums_PX[:, -1:]
    blocks_PN = torch.searchsorted(sums_PX, place_PN, right=True).clamp_(max=sums_PX.shape[1] - 1)
    rest_PN = place_PN - (sums_PX - mass_PX).gather(1, blocks_PN)
    draws_PN = torch.empty(positions, tail_samples, dtype=torch.int32, device=logits_PV.device)
    k = support_PK.shape[1]
    if positions:
        _draw[(positions, tail_samples)](
            logits_PV, blocks_PN, rest_PN, shift_P1.contiguous(), support_PK, draws_PN,
            vocab, k, tail_samples, logits_PV.stride(0), B=BLOCK, KP=triton.next_power_of_2(k),
        )  # fmt: skip
    return draws_PN
