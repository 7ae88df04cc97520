"""Checks of what a loss is called with: choices, shapes and devices. Nothing here waits for a device.

Shapes: P positions, V vocabulary, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gemm import operand_dtype, wide_dtype
from .head import Head
from .rows import TeacherRows

CHOICES = {
    "reduction": ("mean", "sum", "none"),
    "backward": (None, "in_forward", "recompute"),
    "impl": ("auto", "triton", "torch", "reference"),
}


def check_arguments(*, chunk_bytes: int | None, skip_small: float, **chosen: str | None) -> None:
    """Refuse choices that there are not, and numbers out of range.

    Raises:
        ValueError: names the argument.
    """
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            known = ", ".join(str(choice) for choice in CHOICES[name])
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    if chosen["reduction"] == "none" and chosen["backward"] == "in_forward":
        raise ValueError(
            "reduction 'none' has no one upstream gradient to keep gradients for: backward must be 'recompute'"
        )
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
    if not 0.0 <= skip_small < float("inf"):
        raise ValueError(f"skip_small must be finite and not negative, got {skip_small}")


def check_tensors(head: Head, rows: TeacherRows | None, **vectors: Tensor | None) -> None:
    """Refuse tensors that do not fit together; `vectors` are labels and position_weight.

    Raises:
        ValueError: names the tensor, what it must be, and what it is.
    """
    own = head.factors[0]
    hidden_PH, weight_VH = own.input_PH, own.weight_VH
    if hidden_PH.dim() != 2 or weight_VH.dim() != 2 or hidden_PH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden must be [P, H] and weight [V, H], got {list(hidden_PH.shape)} and {list(weight_VH.shape)}"
        )
    positions, device = len(hidden_PH), hidden_PH.device
    if rows is not None and len(rows) != positions:
        raise ValueError(f"there are {positions} hidden states, but {len(rows)} rows")
    vectors = {**vectors, "bias": head.bias_V}
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


def check_split_head(tail: str, impl: str) -> None:
    """Refuse what would take a part of the vocabulary for the whole.

    Raises:
        ValueError: says which.
    """
    if tail == "renorm_both":
        raise ValueError("renorm_both reads a whole head's rows: gather them, or leave vocab_group out")
    if impl == "reference":
        raise ValueError("impl 'reference' does not talk to other ranks; use 'torch' with vocab_group")


def check_direct_gradient(head: Head, grad_scale: float, backward: str | None, reduction: str) -> None:
    """Refuse to write into `weight.grad` where something else than the optimizer reads or rescales it.

    Raises:
        ValueError: says what stands against it.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        raise ValueError("grad_scale writes past DDP and FSDP, which average gradients over ranks: leave it out")
    operand = operand_dtype(head.factors)
    if operand == torch.float16:
        raise ValueError("grad_scale is for one known upstream gradient, but float16 is trained under a GradScaler's")
    if backward == "recompute" or reduction == "none":
        raise ValueError(
            "grad_scale needs the gradient in forward: backward must be 'in_forward' and reduction not 'none'"
        )
    if not (0.0 < grad_scale < float("inf")):
        raise ValueError(f"grad_scale must be finite and positive, got {grad_scale}")
    trained = [factor.weight_VH for factor in head.factors if factor.weight_VH.requires_grad]
    if not all(weight_VH.is_leaf for weight_VH in trained):
        raise ValueError(
            "grad_scale needs a weight that is a leaf: this one is computed, and has no .grad to write into"
        )
    for weight_VH in trained:
        sums = {wide_dtype(operand), operand} if weight_VH.is_cuda else {wide_dtype(operand)}
        if weight_VH.dtype not in sums:
            raise ValueError(
                f"grad_scale adds a GEMM's result to weight.grad, which is {weight_VH.dtype}: on "
                f"{weight_VH.device.type} {operand} operands are not summed in that"
            )
