"""What a logit is to the kernels, and their walks over a position's logits.

Shapes, in the names of vectors: B entries of a block, T threads, L entries of a thread, K support entries,
V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
# What a thread holds of a block: 16 bytes of 2-byte logits, which share a running maximum.
LANE = tl.constexpr(8)


@triton.jit
def sum_tail(
    logits, bias_V, begin, end, shape,
    BLOCK: tl.constexpr, SHAPED: tl.constexpr, CAPPED: tl.constexpr, CROSS: tl.constexpr,
):  # fmt: skip
    """max of z log2(e), sum of e = exp(z - max), and sum of e log e; an online logsumexp with a maximum a thread."""
    at_TL = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    top_T = tl.full((BLOCK // LANE,), -INF, tl.float32)
    sum_T = tl.zeros((BLOCK // LANE,), tl.float32)
    cross_T = tl.zeros((BLOCK // LANE,), tl.float32)
    for start in range(begin, end, BLOCK):
        y_TL = logit(logits, bias_V, start + at_TL, start + at_TL < end, shape, SHAPED, CAPPED) * LOG2E
        new_T = tl.maximum(top_T, tl.max(y_TL, 1))
        zero_T = tl.where(new_T == -INF, 0.0, new_T)
        kept_T, below_TL = tl.exp2(top_T - zero_T), y_TL - zero_T[:, None]
        e_TL = tl.exp2(below_TL)
        if CROSS:
            moved_T = tl.where(kept_T > 0, kept_T * (cross_T + sum_T * (top_T - zero_T) * LN2), 0.0)
            cross_T = moved_T + tl.sum(tl.where(e_TL > 0, e_TL * below_TL, 0.0), 1) * LN2
        sum_T = sum_T * kept_T + tl.sum(e_TL, 1)
        top_T = new_T
    top = tl.max(top_T, 0)
    top = tl.where(top == -INF, 0.0, top)
    kept_T = tl.exp2(top_T - top)
    cross = 0.0
    if CROSS:
        cross = tl.sum(tl.where(kept_T > 0, kept_T * (cross_T + sum_T * (top_T - top) * LN2), 0.0), 0)
    return top, tl.sum(sum_T * kept_T, 0), cross


@triton.jit
def spread(
    logits, gradient, bias_V, begin, end, unit, top, shape,
    BLOCK: tl.constexpr, SHAPED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Write unit * exp(z - max) over the logits; a narrower gradient follows them through their own memory."""
    at_B = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        inside_B = start + at_B < end
        z_B = logit(logits, bias_V, start + at_B, inside_B, shape, SHAPED, CAPPED)
        if logits.dtype != gradient.dtype:
            # None may write where another still reads.
            tl.debug_barrier()
        put(gradient, start + at_B, unit * tl.exp2(z_B * LOG2E - top), inside_B, z_B, shape, SHAPED, CAPPED)


@triton.jit
def logit(logits, bias_V, at, mask, shape, SHAPED: tl.constexpr, CAPPED: tl.constexpr):
    """z, with bias, scale, cap and temperature; -inf where masked or switched off."""
    z = tl.load(logits + at, mask=mask, other=-INF).to(tl.float32)
    if bias_V is not None:
        z += tl.load(bias_V + at, mask=mask, other=0.0).to(tl.float32)
    if SHAPED:
        logit_scale, softcap, temperature = shape
        shaped = z * logit_scale
        if CAPPED:
            shaped = softcap * tanh(shaped / softcap)
        z = tl.where(z == -INF, -INF, shaped / temperature)
    return z


@triton.jit
def put(gradient, at, g, mask, z, shape, SHAPED: tl.constexpr, CAPPED: tl.constexpr):
    """Store dL/dz times dz / d(hidden W^T)."""
    if SHAPED:
        logit_scale, softcap, temperature = shape
        slope = logit_scale / temperature
        if CAPPED:
            capped = tl.where(z == -INF, 0.0, z * temperature / softcap)
            slope *= 1.0 - capped * capped
        g *= slope
    tl.store(gradient + at, g.to(gradient.dtype.element_ty), mask=mask)


@triton.jit
def mark_support(logits, ids_K, kept_K, K_PADDED: tl.constexpr):
    """Set the support's logits to -inf; whether an id is repeated: its place then holds another slot's number."""
    slots_K = tl.arange(0, K_PADDED)
    if logits.dtype.element_ty == tl.float32:
        marks = logits.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        marks = logits.to(tl.pointer_type(tl.int16), bitcast=True)
    tl.debug_barrier()
    tl.store(marks + ids_K, slots_K.to(marks.dtype.element_ty), mask=kept_K)
    tl.debug_barrier()
    found_K = tl.load(marks + ids_K, mask=kept_K, other=0).to(tl.int32)
    tl.debug_barrier()
    tl.store(logits + ids_K, -INF, mask=kept_K)
    tl.debug_barrier()
    return tl.sum((kept_K & (found_K != slots_K)).to(tl.int32), 0) > 0


@triton.jit
def tanh(x):
    """A series where 1 - 2 / (e^2x + 1) would cancel."""
    s = x * x
    series = x * (1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0)))))
    return tl.where(s < 0.0625, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
