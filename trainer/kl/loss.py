"""The public loss: its arguments checked, one differentiable tensor given back.

Shapes: P positions, V vocabulary, H hidden width.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .arguments import check_arguments, check_direct_gradient, check_split_head, check_tensors
from .checks import check_values, check_weights
from .fused import InForward, Recomputed
from .gemm import operand_dtype, wide_dtype
from .head import Head, read_head
from .objective import Divergence, Objective, TailTerm
from .packing import PackedPositions, pack
from .plan import Plan
from .reference import reference_loss
from .rows import TeacherRows
from .stats import KLStats, stats_from_sums
from .support_only import SupportOnly
from .vocab_parallel import VocabShard

GPU_CHUNK_BYTES = 1 << 31
CPU_CHUNK_BYTES = 1 << 26

Tail = Literal["auto", "sampled", "bucket", "truncated", "renorm", "renorm_both", "to_label"]
Reduction = Literal["mean", "sum", "none"]
Backward = Literal["in_forward", "recompute"]
Impl = Literal["auto", "triton", "torch", "reference"]


class LossOptions(TypedDict, total=False):
    """The keywords of `topk_kl` beside `return_stats`, for its overloads."""

    divergence: Divergence
    tail: Tail
    beta: float
    ce_weight: float
    labels: Tensor | None
    temperature: float
    t2_scaling: bool
    bias: Tensor | None
    logit_scale: float
    softcap: float | None
    position_weight: Tensor | None
    ignore_index: int
    num_items: int | float | Tensor | None
    reduction: Reduction
    backward: Backward
    chunk_bytes: int | None
    logits_dtype: torch.dtype | None
    accumulator_dtype: torch.dtype | None
    skip_small: float
    grad_scale: float | None
    vocab_group: ProcessGroup | None
    impl: Impl


@overload
def topk_kl(
    hidden_PH: Tensor,
    weight_VH: Tensor | nn.Module,
    rows: TeacherRows | None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def topk_kl(
    hidden_PH: Tensor,
    weight_VH: Tensor | nn.Module,
    rows: TeacherRows | None,
    *,
    return_stats: Literal[True],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, KLStats]: ...


@torch.compiler.disable  # type: ignore[untyped-decorator]
def topk_kl(
    hidden_PH: Tensor,
    weight_VH: Tensor | nn.Module,
    rows: TeacherRows | None,
    *,
    divergence: Divergence = "forward",
    tail: Tail = "auto",
    beta: float = 0.5,
    ce_weight: float = 0.0,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    t2_scaling: bool = False,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    position_weight: Tensor | None = None,
    ignore_index: int = -100,
    num_items: int | float | Tensor | None = None,
    reduction: Reduction = "mean",
    backward: Backward | None = None,
    chunk_bytes: int | None = None,
    logits_dtype: torch.dtype | None = None,
    accumulator_dtype: torch.dtype | None = None,
    skip_small: float = 0.0,
    grad_scale: float | None = None,
    vocab_group: ProcessGroup | None = None,
    impl: Impl = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, KLStats]:
    """Distil the teacher's rows through the LM head, without ever holding a [P, V] tensor.

    The loss of a position is (1 - ce_weight) * KL + ce_weight * CE in nats, as README derives it. Gradients reach
    hidden, weight and bias; only those that are wanted are computed. Runs under autocast; losses and sums are float32,
    or float64 for float64 inputs.

    Args:
        hidden_PH: the student's last hidden states.
        weight_VH: the LM head: its weight, or the module: an `nn.Linear`, wrapped by peft's LoRA or not. A DTensor is
            gathered once.
        rows: what the teacher said at each position; None only with `ce_weight=1`, plain cross-entropy.
        divergence: `forward` KL; `reverse` and `jsd` with `bucket` and `renorm_both` only.
        tail: how the teacher's mass outside the support enters (README, section 2); `auto` is `sampled` where the rows
            have tail samples and the other settings allow it, else `bucket`.
        beta: of `jsd`: the teacher's share of the mixture, between 0 and 1.
        ce_weight: from 0 to 1.
        labels: [P] int64, row-aligned (the token after each position's), never shifted here.
        temperature: of teacher and student, for `renorm` and `renorm_both`.
        t2_scaling: multiply loss and gradient by temperature^2.
        bias: [V], added to the logits.
        logit_scale: multiplies the logits.
        softcap: then caps them, softcap * tanh(z / softcap).
        position_weight: [P], 0 (or False) masks a position.
        ignore_index: a label that masks its position.
        num_items: what `mean` divides by: the count over all ranks and accumulation steps. Default: the sum of the
            weights of this call's counted positions.
        reduction: `mean` or `sum`, 0-d; `none`, the weighted losses [P], 0 where masked.
        backward: `in_forward` keeps gradients (three GEMMs a position), `recompute` keeps nothing and computes the
            logits again (four). Default: the first, but the second for `reduction="none"` and `renorm_both`.
        chunk_bytes: upper bound of the [chunk, V] buffers; one position's are held in any case. Default: 2 GiB on a
            GPU, whose GEMMs want to be large, 64 MiB elsewhere, where that gains nothing.
        logits_dtype: what the Triton kernel's logits may be rounded to: the operands' dtype halves their memory and
            costs accuracy (README, section 6). Default: float32. The torch path never rounds them.
        accumulator_dtype: what the head's gradient is summed in over chunks, the operands' dtype or the default,
            float32. Off a GPU sums are float32 in any case.
        skip_small: leave columns of the vocabulary out of a chunk's gradient GEMMs where all of its gradients in the
            loss of one position are smaller; 0 leaves none out.
        grad_scale: add the head's gradient straight into `weight.grad`, for a backward pass that is going to bring this
            upstream gradient, 1 for `loss.backward()`; refused where gradients are averaged over ranks or unscaled
            later, and where no GEMM gives the weight's dtype (bf16 off a GPU).
        vocab_group: the weight is this rank's part of the vocabulary, in the order of the group's ranks; hidden, rows
            and the result are the same on all of them. Not with `renorm_both`.
        impl: `triton` and `torch` are the fused loss, `reference` the dense definition, `auto` the fastest there is.
        return_stats: give `KLStats` too, from the same pass.

    Raises:
        ValueError: an argument's shape, dtype, device or value is wrong, or settings that cannot be right together;
            says which, why, and at what position.
    """
    check_arguments(reduction=reduction, backward=backward, impl=impl, chunk_bytes=chunk_bytes, skip_small=skip_small)
    plain = divergence == "forward" and temperature == 1.0
    objective = Objective(
        _settle(tail, rows, plain=plain), divergence, beta, ce_weight, temperature, t2_scaling, logit_scale, softcap
    )
    if objective.reads_labels and labels is None:
        raise ValueError(f"tail is {objective.tail!r} and ce_weight {ce_weight}, but there are no labels")
    if ce_weight < 1.0 and rows is None:
        raise ValueError(f"ce_weight is {ce_weight}, but there are no rows; without a teacher it must be 1")
    if vocab_group is not None:
        check_split_head(objective.tail, impl)
    head = read_head(hidden_PH, weight_VH, bias)
    check_tensors(head, rows, labels=labels, position_weight=position_weight)
    operand = operand_dtype(head.factors)
    wide = wide_dtype(operand)
    for name, dtype in {"logits_dtype": logits_dtype, "accumulator_dtype": accumulator_dtype}.items():
        if dtype not in (None, operand, wide):
            raise ValueError(f"{name} must be {wide}, or the operands' {operand}, got {dtype}")
    unknown = TeacherRows.unknown(len(hidden_PH), hidden_PH.device)
    packed = pack(
        unknown if rows is None else rows, position_weight, labels, ignore_index=ignore_index, objective=objective,
        dtype=wide,
    )  # fmt: skip
    scale = _scale(packed, num_items, reduction) * objective.factor
    shard = None if vocab_group is None else VocabShard.of(head.factors[0].weight_VH, vocab_group)
    tensors = [tensor for factor in head.factors for tensor in (factor.input_PH, factor.weight_VH)]
    plan = Plan(
        scale=scale,
        chunk_bytes=chunk_bytes or (GPU_CHUNK_BYTES if hidden_PH.is_cuda else CPU_CHUNK_BYTES),
        operand=operand,
        impl=_choose(impl, head, packed, shard),
        with_stats=return_stats,
        has_teacher=rows is not None,
        logits_dtype=logits_dtype,
        accumulator_dtype=accumulator_dtype,
        skip_small=skip_small,
        weight_grad_scale=grad_scale,
        shard=shard,
        wants=tuple(_wanted(tensor) for tensor in (head.bias_V, *tensors)),
    )
    if grad_scale is not None:
        check_direct_gradient(head, grad_scale, backward, reduction)
    _check_positions(packed, head, plan, weighted=position_weight is not None)
    with torch.autocast(hidden_PH.device.type, enabled=False):
        loss, sums_F = _compute(head, tensors, packed, plan, backward, reduction)
    return (loss, stats_from_sums(sums_F, has_teacher=rows is not None)) if return_stats else loss


def _compute(
    head: Head,
    tensors: list[Tensor],
    packed: PackedPositions,
    plan: Plan,
    backward: Backward | None,
    reduction: Reduction,
) -> tuple[Tensor, Tensor]:
    if plan.impl == "reference":
        losses_R, sums_F = reference_loss(head, packed, with_stats=plan.with_stats)
    elif packed.objective.tail == "renorm_both":
        losses_R, sums_F = SupportOnly.apply(packed, plan, head.bias_V, *tensors)  # type: ignore[no-untyped-call]
    elif backward == "recompute" or reduction == "none":
        losses_R, sums_F = Recomputed.apply(packed, plan, head.bias_V, *tensors)  # type: ignore[no-untyped-call]
    else:
        loss, sums_F = InForward.apply(packed, plan, head.bias_V, *tensors)  # type: ignore[no-untyped-call]
        return loss, sums_F
    weighted_R = losses_R * packed.weight_R * plan.scale
    if reduction != "none":
        return weighted_R.sum(), sums_F
    if packed.positions_R is None:
        return weighted_R, sums_F
    return weighted_R.new_zeros(len(packed.rows)).index_copy(0, packed.positions_R, weighted_R), sums_F


def _settle(tail: Tail, rows: TeacherRows | None, *, plain: bool) -> TailTerm:
    """Settle `auto`, and refuse `sampled` for rows that lack what it reads."""
    sampled = rows is not None and rows.tail_token_ids_PN is not None
    if tail not in get_args(Tail):
        raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}, got {tail!r}")
    term: TailTerm = tail if tail != "auto" else "sampled" if sampled and plain else "bucket"
    if term == "sampled" and not sampled:
        raise ValueError("tail is 'sampled', but the rows have no tail samples; use 'bucket'")
    if term == "sampled" and rows is not None and rows.entropy_P is None:
        raise ValueError("the rows have tail samples but no entropy, which 'sampled' needs; use 'bucket'")
    return term


def _choose(impl: Impl, head: Head, packed: PackedPositions, shard: VocabShard | None) -> str:
    """Settle `auto`: Triton on a GPU for what its kernel does."""
    if impl not in ("auto", "triton"):
        return impl
    if impl == "auto" and not head.factors[0].weight_VH.is_cuda:
        return "torch"
    reason = _why_not_triton(head, packed, shard)
    if reason is None:
        return "triton"
    if impl == "triton":
        raise ValueError(f"impl is 'triton', but {reason}")
    return "torch"


def _why_not_triton(head: Head, packed: PackedPositions, shard: VocabShard | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if shard is not None:
        return "the kernel does not talk to other ranks; use 'torch' with vocab_group"
    if packed.objective.tail == "renorm_both":
        return "renorm_both has no logits to read; use 'torch'"
    if operand_dtype(head.factors) == torch.float64:
        return "it computes in float32; use 'torch' for float64"
    from .triton_chunks import INTERPRETED, MAX_K, MAX_SAMPLES

    weight_VH, rows = head.factors[0].weight_VH, packed.rows
    if not (weight_VH.is_cuda or INTERPRETED):
        return f"it runs on a GPU, and hidden is on {weight_VH.device}; use 'torch'"
    draws_PN = rows.tail_token_ids_PN if packed.objective.tail == "sampled" else None
    samples = 0 if draws_PN is None else draws_PN.shape[1]
    if rows.token_ids_PK.shape[1] > MAX_K or samples > MAX_SAMPLES:
        return f"its rows hold at most {MAX_K} entries and {MAX_SAMPLES} tail samples; use 'torch'"
    return None


def _check_positions(packed: PackedPositions, head: Head, plan: Plan, *, weighted: bool) -> None:
    """The kernel looks at rows and labels on its way; whoever runs it asks afterwards whether it found fault."""
    if plan.impl == "triton":
        if weighted:
            check_weights(packed)
        return
    local = len(head.factors[0].weight_VH)
    check_values(packed, local if plan.shard is None else plan.shard.vocab_size, has_teacher=plan.has_teacher)


def _wanted(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _scale(packed: PackedPositions, num_items: int | float | Tensor | None, reduction: Reduction) -> Tensor:
    """What the weighted sum over positions is multiplied by; 0-d, and 0 for a mean over nothing."""
    total = packed.weight_R.sum()
    if reduction != "mean":
        if num_items is not None:
            raise ValueError(f"num_items divides a mean, but reduction is {reduction!r}")
        return torch.ones_like(total)
    if num_items is not None:
        count = float(num_items)
        if len(packed) > 0 and not count > 0:
            raise ValueError(f"num_items must be positive, got {count}")
        total = torch.full_like(total, count)
    return torch.where(total > 0, 1.0 / total, 0.0)
