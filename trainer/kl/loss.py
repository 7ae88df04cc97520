"""The public loss: its arguments checked, one differentiable scalar given back.

Shapes: P positions, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, get_args, overload

import torch
from torch import Tensor

from .checks import check_values
from .fused import fused_loss
from .head import accumulation_dtype
from .packing import PackedPositions, TailTerm, pack
from .reference import reference_loss
from .rows import TeacherRows
from .stats import KLStats, stats_from_sums

GPU_CHUNK_BYTES = 1 << 30
CPU_CHUNK_BYTES = 1 << 26

Tail = Literal["auto", "sampled", "bucket", "truncated"]
Reduction = Literal["mean", "sum"]
Impl = Literal["auto", "torch", "reference"]


class LossOptions(TypedDict, total=False):
    """The keywords of `topk_kl` beside `return_stats`, for its overloads."""

    tail: Tail
    labels: Tensor | None
    ce_weight: float
    bias: Tensor | None
    position_weight: Tensor | None
    ignore_index: int
    num_items: int | float | Tensor | None
    reduction: Reduction
    chunk_bytes: int | None
    impl: Impl


@overload
def topk_kl(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows: TeacherRows | None,
    *,
    return_stats: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def topk_kl(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows: TeacherRows | None,
    *,
    return_stats: Literal[True],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, KLStats]: ...


def topk_kl(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    rows: TeacherRows | None,
    *,
    tail: Tail = "auto",
    labels: Tensor | None = None,
    ce_weight: float = 0.0,
    bias: Tensor | None = None,
    position_weight: Tensor | None = None,
    ignore_index: int = -100,
    num_items: int | float | Tensor | None = None,
    reduction: Reduction = "mean",
    chunk_bytes: int | None = None,
    impl: Impl = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, KLStats]:
    """Distil the teacher's rows through the LM head, without ever holding a [P, V] tensor.

    The loss of a position is (1 - ce_weight) * KL + ce_weight * CE in nats, as README derives it. Gradients reach
    hidden, weight and bias; the head's is computed only where it is wanted. Runs under autocast; logits, losses and
    sums are float32, or float64 for float64 inputs.

    Args:
        hidden_PH: the student's last hidden states.
        weight_VH: the LM head.
        rows: what the teacher said at each position; None only with `ce_weight=1`, plain cross-entropy.
        tail: how the teacher's mass outside the support enters; `auto` is `sampled` where the rows have tail
            samples, else `bucket`.
        labels: [P] int64, row-aligned (the token after each position's), never shifted here.
        ce_weight: from 0 to 1.
        bias: [V], added to the logits.
        position_weight: [P], 0 (or False) masks a position.
        ignore_index: a label that masks its position.
        num_items: what `mean` divides by: the count over all ranks and accumulation steps. Default: the sum of the
            weights of this call's counted positions.
        reduction: `mean` or `sum`.
        chunk_bytes: upper bound of the [chunk, V] buffers; one position's are held in any case. Default: 1 GiB on a
            GPU, whose GEMMs want to be large, 64 MiB elsewhere, where that gains nothing.
        impl: `torch` is the fused loss, `reference` the dense definition, `auto` the fastest there is.
        return_stats: give `KLStats` too, from the same pass.

    Raises:
        ValueError: an argument's shape, dtype, device or value is wrong; says which, and at what position.
    """
    _check_choices(tail=tail, reduction=reduction, impl=impl)
    if chunk_bytes is None:
        chunk_bytes = GPU_CHUNK_BYTES if hidden_PH.is_cuda else CPU_CHUNK_BYTES
    _check_mix(rows, labels, ce_weight, chunk_bytes)
    _check_tensors(hidden_PH, weight_VH, rows, labels=labels, bias=bias, position_weight=position_weight)
    positions, device = len(hidden_PH), hidden_PH.device
    wide = accumulation_dtype(hidden_PH, weight_VH)
    packed = pack(
        TeacherRows.unknown(positions, device) if rows is None else rows,
        torch.ones(positions, dtype=wide, device=device) if position_weight is None else position_weight.to(wide),
        labels,
        ignore_index=ignore_index,
        tail=_tail_term(tail, rows),
        ce_weight=ce_weight,
    )
    check_values(packed, len(weight_VH), has_teacher=rows is not None)
    scale = _scale(packed, num_items, reduction)
    if impl == "reference":
        loss, sums_F = reference_loss(hidden_PH, weight_VH, bias, packed, scale, with_stats=return_stats)
    else:
        loss, sums_F = fused_loss(
            hidden_PH, weight_VH, bias, packed, scale, chunk_bytes=chunk_bytes, with_stats=return_stats
        )
    return (loss, stats_from_sums(sums_F, has_teacher=rows is not None)) if return_stats else loss


def _check_choices(*, tail: str, reduction: str, impl: str) -> None:
    for name, value, choices in (("tail", tail, Tail), ("reduction", reduction, Reduction), ("impl", impl, Impl)):
        if value not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _check_mix(rows: TeacherRows | None, labels: Tensor | None, ce_weight: float, chunk_bytes: int) -> None:
    if not 0.0 <= ce_weight <= 1.0:
        raise ValueError(f"ce_weight must be from 0 to 1, got {ce_weight}")
    if ce_weight > 0.0 and labels is None:
        raise ValueError(f"ce_weight is {ce_weight}, but there are no labels")
    if ce_weight < 1.0 and rows is None:
        raise ValueError(f"ce_weight is {ce_weight}, but there are no rows; without a teacher it must be 1")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")


def _check_tensors(hidden_PH: Tensor, weight_VH: Tensor, rows: TeacherRows | None, **vectors: Tensor | None) -> None:
    """Refuse tensors that do not fit together; `vectors` are labels, bias and position_weight."""
    if hidden_PH.dim() != 2 or weight_VH.dim() != 2 or hidden_PH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden must be [P, H] and weight [V, H], got {list(hidden_PH.shape)} and {list(weight_VH.shape)}"
        )
    positions, device = len(hidden_PH), hidden_PH.device
    if rows is not None and len(rows) != positions:
        raise ValueError(f"there are {positions} hidden states, but {len(rows)} rows")
    for name, tensor in vectors.items():
        size = len(weight_VH) if name == "bias" else positions
        if tensor is not None and tensor.shape != (size,):
            raise ValueError(f"{name} must be [{size}], got {list(tensor.shape)}")
    for name, other in {"weight": weight_VH, "rows": rows, **vectors}.items():
        if other is not None and other.device != device:
            raise ValueError(f"{name} is on {other.device}, but hidden on {device}")
    labels, position_weight = vectors["labels"], vectors["position_weight"]
    if labels is not None and labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    if position_weight is not None and position_weight.requires_grad:
        raise ValueError("position_weight requires a gradient, but the loss has none for it")


def _tail_term(tail: Tail, rows: TeacherRows | None) -> TailTerm:
    """Settle `auto`, and refuse `sampled` for rows that lack what it reads."""
    sampled = rows is not None and rows.tail_token_ids_PN is not None
    term = tail if tail != "auto" else "sampled" if sampled else "bucket"
    if term == "sampled" and not sampled:
        raise ValueError("tail is 'sampled', but the rows have no tail samples; use 'bucket'")
    if term == "sampled" and rows is not None and rows.entropy_P is None:
        raise ValueError("the rows have tail samples but no entropy, which 'sampled' needs; use 'bucket'")
    return term


def _scale(packed: PackedPositions, num_items: int | float | Tensor | None, reduction: Reduction) -> Tensor:
    """What the weighted sum over positions is multiplied by; 0-d, and 0 for a mean over nothing."""
    total = packed.weight_R.sum()
    if reduction == "sum":
        if num_items is not None:
            raise ValueError("num_items divides a mean, but reduction is 'sum'")
        return torch.ones_like(total)
    if num_items is not None:
        count = float(num_items)
        if len(packed) > 0 and not count > 0:
            raise ValueError(f"num_items must be positive, got {count}")
        total = torch.full_like(total, count)
    return torch.where(total > 0, 1.0 / total, 0.0)
