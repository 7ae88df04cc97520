"""The dtype of vLLM's logits, and float32 ones where it has no setting for them.

Shapes: P positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# what multiplies with the weight as it is
PLAIN = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")


def logits_dtype(runner: Any) -> str:
    """Return the dtype of the logits that a model runner computes; a step that all ranks take."""
    config = runner.model_config
    hidden_PD = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=runner.device)
    with torch.inference_mode():
        return str(runner.model.compute_logits(hidden_PD).dtype).removeprefix("torch.")


def float32_head(model: Any) -> Callable[[Tensor], Tensor]:
    """Return a function from hidden states to logits whose products are summed, and left, in float32.

    It is for versions of vLLM that compute a generating model's logits in the model's dtype alone.

    Raises:
        ValueError: the model's head is not a plain weight.
    """
    head: Any = getattr(model, "lm_head", None)
    processor: Any = getattr(model, "logits_processor", None)
    method = type(getattr(head, "quant_method", None)).__name__
    if processor is None or method not in PLAIN or processor.logits_as_input:
        raise ValueError(f"{type(model).__name__} has no head of which float32 logits can be had; use head dtype auto")
    weight_VD, bias_V = head.weight, getattr(head, "bias", None)

    def logits_of(hidden_PD: Tensor) -> Tensor:
        if hidden_PD.is_cuda:
            logits_PV = torch.mm(hidden_PD, weight_VD.t(), out_dtype=torch.float32)
        else:
            logits_PV = hidden_PD.float() @ weight_VD.float().t()
        if bias_V is not None:
            logits_PV += bias_V
        if head.tp_size > 1:
            logits_PV = processor._gather_logits(logits_PV)
        logits_PV = logits_PV[:, : processor.org_vocab_size]
        if processor.soft_cap is not None:
            logits_PV = torch.tanh(logits_PV / processor.soft_cap) * processor.soft_cap
        return logits_PV if processor.scale == 1.0 else logits_PV * processor.scale

    return logits_of
