"""The kernels' teacher and divergence: `targets.py`, `divergence.py` and `checks.py` for one position.

Shapes, in the names of pointers and vectors: P of all rows, K support entries, N tail samples, X either, S parts of
the vocabulary, F figures. Equation numbers are the README's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel_logits import INF, LN2

# What no packed sum is: two NaN of a kind that arithmetic does not give.
MISSING = tl.constexpr(-1)


@triton.jit
def read_ids(ids_PX, position, X, PADDED: tl.constexpr):
    slots_X = tl.arange(0, PADDED)
    ids_X = tl.full((PADDED,), -1, tl.int32)
    if ids_PX is not None:
        ids_X = tl.load(ids_PX + position * X + slots_X, mask=slots_X < X, other=-1)
        # An id of more than 32 bits must not become another's.
        ids_X = tl.minimum(tl.maximum(ids_X, -1), 2147483647).to(tl.int32)
    return ids_X, ids_X >= 0


@triton.jit
def read_log_tail(log_tail_P, position):
    """Above 0 only by rounding."""
    log_tail = tl.load(log_tail_P + position)
    return tl.where(log_tail > 0, 0.0, log_tail)


@triton.jit
def read_taken(z_X, log_p_K, K, K_PADDED: tl.constexpr):
    slots_K = tl.arange(0, K_PADDED)
    return tl.load(z_X + slots_K, mask=slots_K < K, other=-INF), tl.load(
        log_p_K + slots_K, mask=slots_K < K, other=-INF
    )


@triton.jit
def pack_sum(top, total):
    """A maximum and a sum as one word, which others see whole or not at all."""
    high = top.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def all_parts(sums_S, cross_S, PARTS: tl.constexpr):
    """What the parts' sums are together, waiting for those that are still MISSING."""
    slots_S = tl.arange(0, PARTS)
    # volatile: a core's own cache may be older than another core's sum
    words_S = tl.load(sums_S + slots_S, volatile=True)
    while tl.max((words_S == MISSING).to(tl.int32), 0) > 0:
        words_S = tl.load(sums_S + slots_S, volatile=True)
    top_S = (words_S >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    sum_S = words_S.to(tl.int32).to(tl.float32, bitcast=True)
    # A part without anything has a sum of 0, and a maximum that says nothing.
    top = tl.max(tl.where(sum_S > 0, top_S, -INF), 0)
    top = tl.where(top == -INF, 0.0, top)
    kept_S, cross_S = tl.where(sum_S > 0, tl.exp2(top_S - top), 0.0), tl.load(cross_S + slots_S)
    cross = tl.sum(tl.where(kept_S > 0, kept_S * (cross_S + sum_S * (top_S - top) * LN2), 0.0), 0)
    # NaN stays NaN: it is not above 0
    return top, tl.sum(tl.where(sum_S > 0, kept_S * sum_S, sum_S), 0), cross


@triton.jit
def student_tail(top, total, support_lse):
    """log of the student's tail mass, and its logsumexp over the whole vocabulary: equation 6."""
    lse_tail = tl.where(total == 0, -INF, top * LN2 + tl.log(total))
    lse = log_add(lse_tail, support_lse)
    return lse_tail - lse, lse


@triton.jit
def unit_gradient(weight, slope_tail, log_q_tail, total, ce_weight):
    """Equation 7, for one unit of exp(z - max)."""
    return weight * ((1.0 - ce_weight) * slope_tail + ce_weight * tl.exp(log_q_tail)) / tl.maximum(total, 1.0)


@triton.jit
def is_broken(
    ids_K, logprobs_K, kept_K, log_tail_P, draws_N, drawn_N, entropy_P, position, V,
    TAIL: tl.constexpr, DIVERGENCE: tl.constexpr,
):  # fmt: skip
    """Whether a rule of `checks.py` is broken, but for repeated ids, which the logits tell."""
    log_tail = tl.load(log_tail_P + position)
    entries = tl.sum(kept_K.to(tl.int32), 0)
    draws = tl.sum(drawn_N.to(tl.int32), 0)
    mass = tl.sum(tl.where(kept_K, tl.exp(logprobs_K), 0.0), 0) + tl.exp(log_tail)
    broken = (tl.max(ids_K, 0) >= V) | (tl.max(draws_N, 0) >= V) | (entries + draws == 0)
    broken |= ~((mass > 0.5) & (mass < 2.0))
    broken |= (entries >= V) & (log_tail > -INF)
    if DIVERGENCE == "reverse":
        broken |= ((entries < V) & (log_tail == -INF)) | (log_tail >= 0)
        broken |= tl.sum((kept_K & (logprobs_K == -INF)).to(tl.int32), 0) > 0
    if TAIL == "sampled":
        entropy = tl.load(entropy_P + position)
        broken |= (draws == 0) & (log_tail > -INF)
        broken |= ~((entropy > -INF) & (entropy < INF))
    return broken


@triton.jit
def log_weights(logprobs_K, kept_K, log_tail, temperature, TAIL: tl.constexpr):
    """Equation 1; for `renorm` all of the mass is the head's."""
    log_p_K = tl.where(kept_K, logprobs_K / temperature, -INF)
    log_mass = log_sum(log_p_K)
    log_kept = 0.0
    if TAIL != "renorm":
        log_kept = tl.log(rest_of(log_tail))
    return log_p_K + tl.where(log_mass > -INF, log_kept - log_mass, 0.0)


@triton.jit
def forward(log_p_K, log_q_K, log_tail, log_q_tail, outside, at_label_K, entropy_P, position, TAIL: tl.constexpr):
    """Equations 4 and 5; `outside` is the cross-entropy of draws and label."""
    p_K, t = tl.exp(log_p_K), tl.exp(log_tail)
    head_constant = tl.sum(times(p_K, log_p_K), 0)
    head = head_constant - tl.sum(times(p_K, log_q_K), 0)
    mass, bucket, constant = tl.sum(p_K, 0), 0.0, 0.0
    if TAIL == "sampled":
        constant = -tl.load(entropy_P + position) - head_constant
        mass += t
    if TAIL == "bucket":
        bucket, constant = t, times(t, log_tail) - times(t, log_q_tail)
        mass += t
    if TAIL == "to_label":
        own = tl.sum(tl.where(at_label_K, p_K, 0.0), 0)
        constant = times(own + t, tl.log(own + t)) - times(own, tl.log(own))
        mass += t
    return head + constant + outside, head, mass * tl.exp(log_q_K) - p_K, mass * tl.exp(log_q_tail) - bucket


@triton.jit
def both_ways(log_p_K, log_q_K, log_tail, log_q_tail, beta, DIVERGENCE: tl.constexpr):
    """Equations 9 to 11, of the support and of the tail as one more outcome."""
    slope_K, terms_K = outcome(log_p_K, log_q_K, beta, DIVERGENCE)
    slope_tail, term_tail = outcome(log_tail, log_q_tail, beta, DIVERGENCE)
    q_K, q_tail, head = tl.exp(log_q_K), tl.exp(log_q_tail), tl.sum(terms_K, 0)
    mean = tl.sum(times(q_K, slope_K), 0) + times(q_tail, slope_tail)
    return head + term_tail, head, times(q_K, slope_K - mean), times(q_tail, slope_tail - mean)


@triton.jit
def outcome(log_p, log_q, beta, DIVERGENCE: tl.constexpr):
    p, q = tl.exp(log_p), tl.exp(log_q)
    if DIVERGENCE == "reverse":
        slope = tl.where(log_q > -INF, log_q - log_p, 0.0)
        term = times(q, slope)
    else:
        log_m = log_add(log_p + tl.log(beta), log_q + tl.log(1.0 - beta))
        slope = tl.where(log_q > -INF, (1.0 - beta) * (log_q - log_m), 0.0)
        term = times(q, slope) + beta * times(p, log_p - log_m)
    return slope, term


@triton.jit
def store_figures(
    figures_F, value, head, log_p_K, log_q_K, log_tail, log_q_tail, log_q_label, total, cross, K_PADDED: tl.constexpr
):  # fmt: skip
    """In the order of `KLStats`."""
    q_K, q_tail, sum_tail = tl.exp(log_q_K), tl.exp(log_q_tail), tl.maximum(total, 1.0)
    log_sum = tl.log(sum_tail)
    entropy = times(q_tail, log_sum - cross / sum_tail - log_q_tail) - tl.sum(times(q_K, log_q_K), 0)
    slots_K = tl.arange(0, K_PADDED)
    likeliest = tl.argmax(log_p_K, 0)
    log_q_likeliest = tl.max(tl.where(slots_K == likeliest, log_q_K, -INF), 0)
    log_q_max = tl.maximum(tl.max(log_q_K, 0), log_q_tail - log_sum)
    tl.store(figures_F + 0, value)
    tl.store(figures_F + 1, -log_q_label)
    tl.store(figures_F + 2, value - head)
    tl.store(figures_F + 3, rest_of(log_tail))
    tl.store(figures_F + 4, entropy)
    tl.store(figures_F + 5, (log_q_likeliest >= log_q_max).to(tl.float32))


@triton.jit
def rest_of(log_t):
    """1 - t: a series where the subtraction would cancel."""
    series = 1.0 + log_t * (1 / 2 + log_t * (1 / 6 + log_t * (1 / 24 + log_t * (1 / 120 + log_t * (1 / 720)))))
    return tl.where(log_t > -0.25, -log_t * series, 1.0 - tl.exp(log_t))


@triton.jit
def times(weight, value):
    """weight * value, 0 where the weight is."""
    return tl.where(weight > 0, weight * value, 0.0)


@triton.jit
def log_sum(z_K):
    top = tl.max(z_K, 0)
    top = tl.where(top == -INF, 0.0, top)
    return top + tl.log(tl.sum(tl.exp(z_K - top), 0))


@triton.jit
def log_add(a, b):
    top = tl.maximum(a, b)
    safe = tl.where(top == -INF, 0.0, top)
    return tl.where(top == -INF, -INF, safe + tl.log(tl.exp(a - safe) + tl.exp(b - safe)))
