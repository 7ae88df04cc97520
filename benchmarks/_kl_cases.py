"""What benchmarks/kl.py puts into a loss, and the losses in plain torch that ours is measured beside.

Shapes: P positions, C of a chunk, H hidden width, V vocabulary, K support entries, N tail samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from teachercache.trainer.kl import TeacherRows

CE_WEIGHT = 0.3
K = 100


@dataclass(frozen=True, eq=False)
class Case:
    """A student's last hidden states and head, both leaves, and its teacher's rows."""

    hidden_PH: Tensor
    weight_VH: Tensor
    labels_P: Tensor
    rows: TeacherRows


@dataclass(frozen=True, eq=False)
class Variant:
    """A loss to be measured."""

    name: str
    run: Callable[[Case, int | None], Tensor | None]
    """Of a case and a chunk's positions, None for its own choice: the mean loss, or None where there is no backward."""
    objective: str
    """What its gradient is judged by: see `define`."""
    group: str
    """The best of a group counts."""
    rows: tuple[int | None, ...] = (None,)
    entries: tuple[int, int] = (K, 0)
    """Support and tail samples of a row."""


def make_case(positions: int, width: int, vocab: int, device: str, spread: float = 2.0) -> Case:
    """A student whose logits are normal with this standard deviation, without rows yet."""
    generator = torch.Generator(device).manual_seed(0)
    shared = {"device": device, "generator": generator}
    hidden_PH = torch.randn(positions, width, dtype=torch.bfloat16, **shared)
    weight_VH = torch.randn(vocab, width, dtype=torch.bfloat16, **shared).mul_(spread / width**0.5)
    labels_P = torch.randint(vocab, (positions,), **shared)
    unknown = TeacherRows.unknown(positions, hidden_PH.device)
    return Case(hidden_PH.requires_grad_(), weight_VH.requires_grad_(), labels_P, unknown)


def with_random_rows(case: Case, k: int, samples: int) -> Case:
    """Rows of 3 percent tail whose ids lie all over the vocabulary: one in each of k + samples parts of it."""
    positions, vocab, device = len(case.hidden_PH), len(case.weight_VH), case.hidden_PH.device
    generator = torch.Generator(device).manual_seed(1)
    size = vocab // (k + samples)
    parts_X = torch.randperm(k + samples, device=device, generator=generator, dtype=torch.int32) * size
    ids_PX = torch.randint(size, (positions, k + samples), device=device, generator=generator, dtype=torch.int32)
    ids_PX += parts_X
    logprobs_PK = torch.randn(positions, k, device=device, generator=generator).mul_(3.0).log_softmax(1)
    logprobs_PK += math.log(0.97)
    log_tail_P = torch.full((positions,), math.log(0.03), device=device)
    if samples == 0:
        return replace(case, rows=TeacherRows(ids_PX, logprobs_PK, log_tail_P))
    draws_PN = ids_PX[:, k:].contiguous()
    entropy_P = -(logprobs_PK.exp() * logprobs_PK).sum(1)
    return replace(case, rows=TeacherRows(ids_PX[:, :k].contiguous(), logprobs_PK, log_tail_P, draws_PN, entropy_P))


def with_teacher_rows(case: Case, k: int, samples: int) -> Case:
    """Rows of a teacher whose logits are the student's and half a nat of noise."""
    generator = torch.Generator(case.hidden_PH.device).manual_seed(1)
    with torch.no_grad():
        logits_PV = case.hidden_PH.double() @ case.weight_VH.double().t()
        log_p_PV = torch.empty_like(logits_PV).normal_(0.0, 0.5, generator=generator).add_(logits_PV).log_softmax(1)
        top = log_p_PV.topk(k, dim=1)
        log_tail_P = log_p_PV.scatter(1, top.indices, -torch.inf).logsumexp(1)
        rows = TeacherRows(top.indices.int(), top.values.float(), log_tail_P.float())
        if samples:
            tail_PV = log_p_PV.exp().scatter_(1, top.indices, 0.0)
            draws_PN = torch.multinomial(tail_PV, samples, replacement=True, generator=generator).int()
            entropy_P = -(log_p_PV.exp() * log_p_PV).sum(1).float()
            rows = replace(rows, tail_token_ids_PN=draws_PN, entropy_P=entropy_P)
    return replace(case, rows=rows)


def define(objective: str, log_q_CV: Tensor, rows: TeacherRows, labels_C: Tensor) -> Tensor:
    """The objectives as they are defined; [C]."""
    if objective == "ce":
        return -log_q_CV.gather(1, labels_C[:, None]).squeeze(1)
    if objective == "mix":
        kl_C, ce_C = (define(part, log_q_CV, rows, labels_C) for part in ("bucket", "ce"))
        return (1.0 - CE_WEIGHT) * kl_C + CE_WEIGHT * ce_C
    ids_CK, log_p_CK = rows.token_ids_PK.long(), rows.logprobs_PK.to(log_q_CV.dtype)
    log_t_C = rows.log_tail_mass_P.to(log_q_CV.dtype)
    head_C = (log_p_CK.exp() * (log_p_CK - log_q_CV.gather(1, ids_CK))).sum(1)
    if objective == "truncated":
        return head_C
    if objective == "bucket":
        log_q_tail_C = log_q_CV.scatter(1, ids_CK, -torch.inf).logsumexp(1)
        return head_C + log_t_C.exp() * (log_t_C - log_q_tail_C)
    assert objective == "sampled" and rows.tail_token_ids_PN is not None and rows.entropy_P is not None
    log_q_draws_CN = log_q_CV.gather(1, rows.tail_token_ids_PN.long())
    known_C = rows.entropy_P + (log_p_CK.exp() * log_p_CK).sum(1)
    return head_C - known_C - log_t_C.exp() * log_q_draws_CN.mean(1)


def _anchor(hidden_CH: Tensor, weight_VH: Tensor, rows: TeacherRows, labels_C: Tensor) -> Tensor:
    """Summed over positions, as it is usually written: log-softmax in float32 of bf16 logits, the tail left out."""
    log_q_CV = torch.log_softmax(hidden_CH @ weight_VH.t(), dim=1, dtype=torch.float32)
    return define("truncated", log_q_CV, rows, labels_C).sum()


def online(case: Case, _: int | None) -> Tensor:
    """Against a live teacher's whole distribution: its head is run too, the body before it is left out."""
    with torch.no_grad():
        log_p_PV = torch.log_softmax(case.hidden_PH @ case.weight_VH.t(), dim=1, dtype=torch.float32)
    log_q_PV = torch.log_softmax(case.hidden_PH @ case.weight_VH.t(), dim=1, dtype=torch.float32)
    return torch.nn.functional.kl_div(log_q_PV, log_p_PV, log_target=True, reduction="batchmean")


def dense(case: Case, _: int | None) -> Tensor:
    """All positions at once."""
    return _anchor(case.hidden_PH, case.weight_VH, case.rows, case.labels_P) / len(case.hidden_PH)


def forward_chunked(case: Case, rows: int | None) -> Tensor:
    """In chunks whose logits autograd keeps."""
    sums = [_anchor(*chunk) for chunk in _chunks(case, rows)]
    return torch.stack(sums).sum() / len(case.hidden_PH)


def recompute_chunked(case: Case, rows: int | None) -> Tensor:
    """In chunks whose logits are computed again in backward, as usually written: slices, a checkpoint each."""

    def anchor(hidden_CH: Tensor, weight_VH: Tensor, rows: TeacherRows) -> Tensor:
        logits_CV = (hidden_CH @ weight_VH.t()).float()
        log_q_CK = logits_CV.gather(1, rows.token_ids_PK.long()) - logits_CV.logsumexp(1, keepdim=True)
        return (rows.logprobs_PK.exp() * (rows.logprobs_PK - log_q_CK)).sum()

    total = torch.zeros((), device=case.hidden_PH.device)
    step = rows or len(case.hidden_PH)
    for begin in range(0, len(case.hidden_PH), step):
        part = slice(begin, begin + step)
        chunk = case.hidden_PH[part], case.weight_VH, case.rows.select(part)
        total = total + checkpoint(anchor, *chunk, use_reentrant=False)
    return total / len(case.hidden_PH)


def recompute_tuned(case: Case, rows: int | None) -> Tensor:
    """The same as fast as plain torch lets us: split at once, one pass from bf16 logits to float32 log-softmax."""
    sums = [checkpoint(_anchor, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in _chunks(case, rows)]
    return torch.stack(sums).sum() / len(case.hidden_PH)


def _chunks(case: Case, rows: int | None) -> Iterator[tuple[Tensor, Tensor, TeacherRows, Tensor]]:
    """What `_anchor` takes; split at once, as the backward of a slice is as large as what it was cut from."""
    step = rows or len(case.hidden_PH)
    for number, hidden_CH in enumerate(case.hidden_PH.split(step)):
        part = slice(number * step, number * step + len(hidden_CH))
        yield hidden_CH, case.weight_VH, case.rows.select(part), case.labels_P[part]


@torch.no_grad()
def gemms(case: Case, rows: int | None) -> None:
    """The three GEMMs alone: logits, the gradient in hidden, and the head's, summed over chunks."""
    hidden_PH, weight_VH = case.hidden_PH, case.weight_VH
    step = min(rows or len(hidden_PH), len(hidden_PH))
    memory_CV = hidden_PH.new_empty(step, len(weight_VH))
    input_PH, head_VH = torch.empty_like(hidden_PH), torch.empty_like(weight_VH)
    for chunk_CH, input_CH in zip(hidden_PH.split(step), input_PH.split(step), strict=True):
        logits_CV = torch.mm(chunk_CH, weight_VH.t(), out=memory_CV[: len(chunk_CH)])
        torch.mm(logits_CV, weight_VH, out=input_CH)
        first = input_CH.data_ptr() == input_PH.data_ptr()
        torch.addmm(head_VH, logits_CV.t(), chunk_CH, beta=0.0 if first else 1.0, out=head_VH)


def plain_variants() -> list[Variant]:
    """The GEMMs first, then what is written in plain torch."""
    return [
        Variant("gemm", gemms, "none", "gemm", (1024, 2048, 4096, 8192)),
        Variant("online", online, "none", "online"),
        Variant("dense", dense, "truncated", "dense"),
        Variant("forward_chunked", forward_chunked, "truncated", "forward_chunked", (1024,)),
        Variant("recompute_chunked", recompute_chunked, "truncated", "recompute", (1024, 4096)),
        Variant("recompute_tuned", recompute_tuned, "truncated", "recompute_tuned", (1024, 4096)),
    ]


def dense_variants(objective: str, entries: tuple[int, int]) -> list[Variant]:
    """An objective as it is defined, with ever fewer roundings: what an error is held against, never timed."""

    def variant(name: str, of_inputs: torch.dtype, of_logits: torch.dtype) -> Variant:
        def run(case: Case, _: int | None) -> Tensor:
            logits_PV = case.hidden_PH.to(of_inputs) @ case.weight_VH.to(of_inputs).t()
            log_q_PV = torch.log_softmax(logits_PV, dim=1, dtype=of_logits)
            return define(objective, log_q_PV, case.rows, case.labels_P).mean()

        return Variant(name, run, objective, "dense", entries=entries)

    return [
        variant("dense_bf16", torch.bfloat16, torch.bfloat16),
        variant("dense", torch.bfloat16, torch.float32),
        variant("dense_fp32", torch.float32, torch.float32),
    ]
