"""The loss as a module, for those who keep its settings in one."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from .loss import LossOptions, topk_kl
from .rows import TeacherRows


class TopKKLLoss(nn.Module):
    """`topk_kl` with settings of its own: `TopKKLLoss(ce_weight=0.3)(hidden_PH, lm_head, rows, labels=labels)`.

    What differs from call to call, tensors and `num_items`, is given to the call, which may override a setting.

    Raises:
        TypeError: `topk_kl` has no such setting.
    """

    def __init__(self, **options: Unpack[LossOptions]) -> None:
        super().__init__()
        unknown = options.keys() - {*LossOptions.__annotations__, "return_stats"}
        if unknown:
            raise TypeError(f"topk_kl has no setting {', '.join(sorted(unknown))}")
        self.options = options

    def forward(
        self, hidden_PH: Tensor, weight_VH: Tensor | nn.Module, rows: TeacherRows | None, **options: Unpack[LossOptions]
    ) -> Tensor:
        """The loss, 0-d, or [P] with `reduction="none"`."""
        merged: LossOptions = {**self.options, **options}
        return topk_kl(hidden_PH, weight_VH, rows, **merged)

    def extra_repr(self) -> str:
        """The settings."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
