"""What an LM head is to the loss: a weight, a bias, and the low-rank products that adapters add.

Shapes: P positions, V vocabulary, H hidden width, R rank of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gemm import Factor


@dataclass(frozen=True, eq=False)
class Head:
    """The factors whose products add up to the logits, the head's own first, and the bias."""

    factors: list[Factor]
    bias_V: Tensor | None


def read_head(hidden_PH: Tensor, head: Tensor | nn.Module, bias_V: Tensor | None) -> Head:
    """Take a head apart: a weight [V, H], an `nn.Linear`, or one that peft has wrapped with LoRA.

    An adapter's A is applied here, by autograd; only its B, which meets the vocabulary, is the loss's affair. A sharded
    weight (DTensor) is gathered once, and its gradient averaged over the ranks that hold it, as FSDP2 does.

    Raises:
        ValueError: a bias beside a module, or a module that is none of these; what would train silently wrong.
    """
    if isinstance(head, Tensor):
        return Head([Factor(hidden_PH, _gathered(head))], None if bias_V is None else _gathered(bias_V))
    if bias_V is not None:
        raise ValueError("give a head as a module or a weight with a bias, not a module and a bias")
    layer: Any = _active_copy(head)
    adapters = []
    if isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
        adapters = _adapters(hidden_PH, layer)
        layer = layer.get_base_layer()
    # FSDP2 and parametrizations give a layer a class of its own, but not another forward.
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise ValueError(f"a head must be a weight, nn.Linear or a LoRA-wrapped nn.Linear, not {name}")
    bias_V = None if layer.bias is None else _gathered(layer.bias)
    return Head([Factor(hidden_PH, _gathered(layer.weight)), *adapters], bias_V)


def _active_copy(module: nn.Module) -> nn.Module:
    """The trained copy of a module that peft keeps whole (`modules_to_save`)."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return module
    wrapper: Any = module
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active:
        original: nn.Module = wrapper.original_module
        return original
    return copies[active[0]]


def _adapters(hidden_PH: Tensor, layer: Any) -> list[Factor]:
    """The products of a peft LoRA layer's active adapters; A and dropout by autograd, B as a head of its own."""
    if layer.disable_adapters and layer.merged:
        # as its forward does
        layer.unmerge()
    if layer.disable_adapters or layer.merged:
        return []
    factors = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        kind = getattr(layer, "lora_variant", {}).get(name)
        if kind is not None or layer.lora_B[name].bias is not None:
            raise ValueError(f"adapter {name!r} of the head is more than B A: merge it into the weight first")
        down: nn.Linear = layer.lora_A[name]
        dropped_PH = layer.lora_dropout[name](hidden_PH.to(down.weight.dtype))
        low_PR = F.linear(dropped_PH, _gathered(down.weight)) * layer.scaling[name]
        factors.append(Factor(low_PR, _gathered(layer.lora_B[name].weight)))
    return factors


def _gathered(tensor: Tensor) -> Tensor:
    """A DTensor's whole, whose gradient comes back in shards; other tensors as they are."""
    if not torch.distributed.is_available():
        return tensor
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if "tp" in (mesh.mesh_dim_names or ()):
        raise ValueError("a tensor-parallel head is given as this rank's part of the weight, with vocab_group")
    whole: Tensor = tensor.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    return _Averaged.apply(whole, mesh.size())  # type: ignore[no-untyped-call, no-any-return]


class _Averaged(torch.autograd.Function):
    """The identity, whose gradient is a share: shards add up what ranks found, and FSDP2 gives their mean."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None
