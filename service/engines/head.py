"""The head of a causal language model, run apart from its body so that a block of positions is enough.

Shapes: L tokens of one sequence, D hidden size, P positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Head:
    """A linear map from hidden states to logits, with the model's soft-cap.

    Logits are float32, and so are the products and sums behind them, also where the weights have 16 bits.
    """

    def __init__(self, linear: nn.Linear, softcap: float | None) -> None:
        self._linear = linear
        self._softcap = softcap
        # a GPU multiplies 16-bit operands into float32 by itself, a CPU needs a float32 copy
        mixed = linear.weight.is_cuda and linear.weight.dtype != torch.float32
        self._float32_VD = None if mixed else linear.weight.float()

    def __call__(self, hidden_PD: Tensor) -> Tensor:
        """Return the logits [P, V]."""
        if self._float32_VD is None:
            logits_PV = torch.mm(hidden_PD, self._linear.weight.T, out_dtype=torch.float32)
        else:
            logits_PV = hidden_PD.float() @ self._float32_VD.T
        if self._linear.bias is not None:
            logits_PV += self._linear.bias.float()
        if self._softcap is not None:
            logits_PV = logits_PV.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits_PV


def separate_head(model: Any, input_ids_1L: Tensor) -> Head | None:
    """Return the model's head, or None where body and head apart do not give the model's own logits.

    They are compared on the sequence given: a model may scale its logits, or do anything else, after the head.
    """
    linear = model.get_output_embeddings()
    # quantised layers are sub-classes whose weights are not what they multiply with
    if model.base_model is model or type(linear) is not nn.Linear:
        return None
    hidden_1LD = getattr(model.base_model(input_ids=input_ids_1L, use_cache=False), "last_hidden_state", None)
    if hidden_1LD is None or hidden_1LD.shape[-1] != linear.in_features:
        return None
    head = Head(linear, getattr(model.config.get_text_config(), "final_logit_softcapping", None))
    own_LV, apart_LV = model(input_ids=input_ids_1L, use_cache=False).logits[0].float(), head(hidden_1LD[0])
    if own_LV.shape != apart_LV.shape:
        return None
    # the model rounds to its own dtype, and float32 sums depend on their order
    tolerance = max(2 * torch.finfo(linear.weight.dtype).eps, 1e-5) * own_LV.abs().max()
    return head if (own_LV - apart_LV).abs().max() <= tolerance else None
