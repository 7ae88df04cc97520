"""A chunk of logits judged by three Triton kernels, in place, as `chunk.py` does it in plain torch.

`take_out` moves what the target has weight on out of the logits; `sweep` reads what is left, the tail, and leaves its
gradient; `judge` gives the loss and puts the other gradients back. Only `sweep` walks the vocabulary: several programs
share a position, so that what they read once is still in the cache when they read it again.

Shapes, in the names of pointers and vectors: C positions of the chunk, P of all rows, K support entries, N tail
samples, V vocabulary, S parts of it, F figures, X = K + N + 1. Equation numbers are the README's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel_logits import INF, LOG2E, logit, mark_support, put, spread, sum_tail
from .kernel_target import (
    all_parts,
    both_ways,
    forward,
    is_broken,
    log_sum,
    log_weights,
    pack_sum,
    read_ids,
    read_log_tail,
    read_taken,
    store_figures,
    student_tail,
    times,
    unit_gradient,
)


@triton.jit
def take_out(
    logits_CV, logits_stride, bias_V, index_C, first, ids_PK, logprobs_PK, log_tail_P, draws_PN, entropy_P, labels_C,
    z_CX, log_p_CK, scalars_C3, broken_C, V, K, N, logit_scale, softcap, temperature,
    K_PADDED: tl.constexpr, N_PADDED: tl.constexpr, TAIL: tl.constexpr, DIVERGENCE: tl.constexpr,
    SHAPED: tl.constexpr, CAPPED: tl.constexpr, HAS_TEACHER: tl.constexpr,
):  # fmt: skip
    """Gather the logits of support, draws and label, and set the support's to -inf; tell rows that cannot be judged.

    scalars: the student's logsumexp over the support, the mass of all weights, and the weight on the tail as a whole.
    """
    row = tl.program_id(0).to(tl.int64)
    position = first + row if index_C is None else tl.load(index_C + row)
    logits, shape = logits_CV + row * logits_stride, (logit_scale, softcap, temperature)
    slots_K, slots_N = tl.arange(0, K_PADDED), tl.arange(0, N_PADDED)

    ids_K, kept_K = read_ids(ids_PK, position, K, K_PADDED)
    draws_N, drawn_N = read_ids(draws_PN, position, N, N_PADDED)
    log_tail = read_log_tail(log_tail_P, position)
    logprobs_K = tl.load(logprobs_PK + position * K + slots_K, mask=kept_K, other=-INF)
    broken = position < 0
    if HAS_TEACHER:
        broken |= is_broken(
            ids_K, logprobs_K, kept_K, log_tail_P, draws_N, drawn_N, entropy_P, position, V, TAIL, DIVERGENCE
        )  # fmt: skip
    kept_K, drawn_N = kept_K & (ids_K < V), drawn_N & (draws_N < V)
    log_p_K = log_weights(logprobs_K, kept_K, log_tail, temperature, TAIL)
    p_K, t = tl.exp(log_p_K), tl.exp(log_tail)
    mass = tl.sum(p_K, 0)
    if (TAIL == "sampled") | (TAIL == "bucket") | (TAIL == "to_label"):
        mass += t

    z_K = logit(logits, bias_V, ids_K, kept_K, shape, SHAPED, CAPPED)
    z_label = -INF
    if labels_C is not None:
        label = tl.load(labels_C + row)
        has_label = (label >= 0) & (label < V)
        broken |= ~has_label
        z_label = logit(logits, bias_V, label, has_label, shape, SHAPED, CAPPED)
    broken |= mark_support(logits, ids_K, kept_K, K_PADDED)
    z_N = logit(logits, bias_V, draws_N, drawn_N, shape, SHAPED, CAPPED)
    broken |= tl.sum((drawn_N & (z_N == -INF)).to(tl.int32), 0) > 0

    z_X = z_CX + row * (K + N + 1)
    tl.store(z_X + slots_K, z_K, mask=slots_K < K)
    tl.store(z_X + K + slots_N, z_N, mask=slots_N < N)
    tl.store(z_X + K + N, z_label)
    tl.store(log_p_CK + row * K + slots_K, log_p_K, mask=slots_K < K)
    tl.store(scalars_C3 + row * 3, log_sum(z_K))
    tl.store(scalars_C3 + row * 3 + 1, mass)
    tl.store(scalars_C3 + row * 3 + 2, t if TAIL == "bucket" else 0.0)
    tl.store(broken_C + row, broken.to(tl.int8))


@triton.jit
def sweep(
    logits_CV, logits_stride, gradient_CV, gradient_stride, bias_V, index_C, first, log_tail_P,
    z_CX, log_p_CK, scalars_C3, sums_CS, cross_CS, weight_C, scale, tickets,
    V, K, N, taken, ce_weight, beta, logit_scale, softcap, temperature,
    K_PADDED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, DIVERGENCE: tl.constexpr,
    SHAPED: tl.constexpr, CAPPED: tl.constexpr, WITH_STATS: tl.constexpr, WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Sum up a part of a position's tail and, when the other parts have been, turn it into its gradient.

    Programs take numbers: one that waits knows that those before it are running, and those it waits for come next.
    """
    number = tl.program_id(0)
    if PARTS > 1:
        number = tl.atomic_add(tickets, 1, sem="relaxed") - taken
    row, part = (number // PARTS).to(tl.int64), number % PARTS
    logits, gradient = logits_CV + row * logits_stride, gradient_CV + row * gradient_stride
    shape, blocks = (logit_scale, softcap, temperature), tl.cdiv(V, BLOCK)
    begin, end = part * blocks // PARTS * BLOCK, tl.minimum((part + 1) * blocks // PARTS * BLOCK, V)
    top, total, cross = sum_tail(logits, bias_V, begin, end, shape, BLOCK, SHAPED, CAPPED, WITH_STATS)
    tl.store(sums_CS + row * PARTS + part, pack_sum(top, total))
    tl.store(cross_CS + row * PARTS + part, cross)
    if WITH_GRADIENT:
        support_lse = tl.load(scalars_C3 + row * 3)
        mass, bucket = tl.load(scalars_C3 + row * 3 + 1), tl.load(scalars_C3 + row * 3 + 2)
        weight = tl.load(weight_C + row) * tl.load(scale)
        tl.debug_barrier()
        top, total, _ = all_parts(sums_CS + row * PARTS, cross_CS + row * PARTS, PARTS)
        log_q_tail, lse = student_tail(top, total, support_lse)
        slope_tail = mass * tl.exp(log_q_tail) - bucket
        if DIVERGENCE != "forward":
            position = first + row if index_C is None else tl.load(index_C + row)
            z_K, log_p_K = read_taken(z_CX + row * (K + N + 1), log_p_CK + row * K, K, K_PADDED)
            log_tail = read_log_tail(log_tail_P, position)
            _, _, _, slope_tail = both_ways(log_p_K, z_K - lse, log_tail, log_q_tail, beta, DIVERGENCE)
        unit = unit_gradient(weight, slope_tail, log_q_tail, total, ce_weight)
        spread(logits, gradient, bias_V, begin, end, unit, top, shape, BLOCK, SHAPED, CAPPED)


@triton.jit
def judge(
    gradient_CV, gradient_stride, index_C, first, ids_PK, log_tail_P, draws_PN, entropy_P, labels_C,
    z_CX, log_p_CK, scalars_C3, sums_CS, cross_CS, weight_C, scale, loss_C, figures_CF,
    V, K, N, ce_weight, beta, logit_scale, softcap, temperature,
    K_PADDED: tl.constexpr, N_PADDED: tl.constexpr, PARTS: tl.constexpr, F: tl.constexpr, TAIL: tl.constexpr,
    DIVERGENCE: tl.constexpr, SHAPED: tl.constexpr, CAPPED: tl.constexpr, HAS_TEACHER: tl.constexpr,
    CE: tl.constexpr, WITH_STATS: tl.constexpr, WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The loss and the figures of a position, and the gradient at its support, draws and label."""
    row = tl.program_id(0).to(tl.int64)
    position = first + row if index_C is None else tl.load(index_C + row)
    shape, z_X = (logit_scale, softcap, temperature), z_CX + row * (K + N + 1)
    ids_K, kept_K = read_ids(ids_PK, position, K, K_PADDED)
    draws_N, drawn_N = read_ids(draws_PN, position, N, N_PADDED)
    kept_K, drawn_N = kept_K & (ids_K < V), drawn_N & (draws_N < V)
    log_tail = read_log_tail(log_tail_P, position)
    z_K, log_p_K = read_taken(z_X, log_p_CK + row * K, K, K_PADDED)
    z_N = tl.load(z_X + K + tl.arange(0, N_PADDED), mask=drawn_N, other=-INF)
    z_label, label = tl.load(z_X + K + N), -1
    if labels_C is not None:
        label = tl.load(labels_C + row)
    at_label_K = kept_K & (ids_K == label)
    share = tl.exp(log_tail) / tl.maximum(tl.sum(drawn_N.to(tl.float32), 0), 1.0)
    label_kl = 0.0
    if TAIL == "to_label":
        label_kl = tl.exp(log_tail)

    top, total, cross = all_parts(sums_CS + row * PARTS, cross_CS + row * PARTS, PARTS)
    log_q_tail, lse = student_tail(top, total, tl.load(scalars_C3 + row * 3))
    log_q_K, log_q_label = z_K - lse, z_label - lse
    if DIVERGENCE == "forward":
        outside = tl.sum(tl.where(drawn_N, -share * (z_N - lse), 0.0), 0) - times(label_kl, log_q_label)
        value, head, slope_K, slope_tail = forward(
            log_p_K, log_q_K, log_tail, log_q_tail, outside, at_label_K, entropy_P, position, TAIL
        )  # fmt: skip
    else:
        value, head, slope_K, slope_tail = both_ways(log_p_K, log_q_K, log_tail, log_q_tail, beta, DIVERGENCE)
    kl_weight, loss = 1.0 - ce_weight, value
    if CE:
        loss = -ce_weight * log_q_label
        if HAS_TEACHER:
            loss += times(kl_weight, value)
    tl.store(loss_C + row, loss)
    if WITH_STATS:
        store_figures(
            figures_CF + row * F, value, head, log_p_K, log_q_K, log_tail, log_q_tail, log_q_label, total, cross,
            K_PADDED,
        )  # fmt: skip
    if WITH_GRADIENT:
        # Support, draws, and a label that is none of them, each store their own sum.
        gradient, weight = gradient_CV + row * gradient_stride, tl.load(weight_C + row) * tl.load(scale)
        per_share = unit_gradient(weight, slope_tail, log_q_tail, total, ce_weight)
        at_label = weight * (kl_weight * label_kl + ce_weight)
        g_K = weight * (kl_weight * slope_K + ce_weight * tl.exp(log_q_K)) - tl.where(at_label_K, at_label, 0.0)
        put(gradient, ids_K, g_K, kept_K, z_K, shape, SHAPED, CAPPED)
        is_label_N = drawn_N & (draws_N == label)
        # Equal draws count each other, and all store the same.
        same_NN = (draws_N[:, None] == draws_N[None, :]) & drawn_N[None, :]
        drawn_share_N = weight * kl_weight * share * tl.sum(same_NN.to(tl.float32), 1)
        g_N = per_share * tl.exp2(z_N * LOG2E - top) - drawn_share_N - tl.where(is_label_N, at_label, 0.0)
        put(gradient, draws_N, g_N, drawn_N, z_N, shape, SHAPED, CAPPED)
        if labels_C is not None:
            met = tl.sum(is_label_N.to(tl.int32), 0) + tl.sum(at_label_K.to(tl.int32), 0)
            g_label = per_share * tl.exp2(z_label * LOG2E - top) - at_label
            put(gradient, label, g_label, (label >= 0) & (label < V) & (met == 0), z_label, shape, SHAPED, CAPPED)


@triton.jit
def multiply(numbers, factor, out, size, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr):
    """out = numbers * factor; in place, a factor of 1, the usual one, costs no traffic."""
    by = tl.load(factor)
    if (by != 1.0) | (not IN_PLACE):
        at_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values_B = tl.load(numbers + at_B, mask=at_B < size).to(tl.float32)
        tl.store(out + at_B, (values_B * by).to(out.dtype.element_ty), mask=at_B < size)
