"""The teacher's rows as tensors: what the loss knows of the teacher at each position.

Shapes: P positions, K support entries of a row, N tail samples of a row (K and N padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PAD_ID = -1


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """Sparse teacher distributions at P positions, the torch twin of `format_spec.rows.Rows`.

    Rows are ragged: a slot with a negative token id is padding, and its logprob is never read. Construction checks
    shapes, dtypes and devices only; values are checked by `topk_kl`, which knows the vocabulary and which positions
    count.

    Raises:
        ValueError: a field has another shape, dtype or device than described here, or requires a gradient.
    """

    token_ids_PK: Tensor
    """int64 or int32, the support; padding is -1."""
    logprobs_PK: Tensor
    """float32, nats; padding is -inf."""
    log_tail_mass_P: Tensor
    """float32, log of the probability outside the support; -inf is an empty tail."""
    tail_token_ids_PN: Tensor | None = None
    """Like `token_ids_PK`, tail samples, repeats allowed; padding is -1; a row whose tail is empty has none."""
    entropy_P: Tensor | None = None
    """float32, entropy of the teacher's full distribution in nats; only the `sampled` objective reads it."""

    def __post_init__(self) -> None:
        if self.token_ids_PK.dim() != 2 or self.token_ids_PK.shape[1] < 1:
            raise ValueError(f"token_ids_PK must be [P, K >= 1], got {list(self.token_ids_PK.shape)}")
        positions, k = self.token_ids_PK.shape
        self._check("token_ids_PK", (positions, k), torch.int64, torch.int32)
        self._check("logprobs_PK", (positions, k), torch.float32)
        self._check("log_tail_mass_P", (positions,), torch.float32)
        if self.tail_token_ids_PN is not None:
            samples = self.tail_token_ids_PN.shape[-1] if self.tail_token_ids_PN.dim() else 0
            self._check("tail_token_ids_PN", (positions, max(samples, 1)), self.token_ids_PK.dtype)
        if self.entropy_P is not None:
            self._check("entropy_P", (positions,), torch.float32)

    def _check(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        tensor: Tensor = getattr(self, name)
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != self.device:
            raise ValueError(
                f"{name} must be {list(shape)} {' or '.join(map(str, dtypes))} on {self.device}, "
                f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
        if tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, but the loss has none for the teacher")

    @classmethod
    def unknown(cls, positions: int, device: torch.device) -> TeacherRows:
        """Rows of a teacher of whom nothing is known: no support, all mass in the tail, so that `bucket` is 0."""
        ids_PK = torch.full((positions, 1), PAD_ID, device=device)
        logprobs_PK = torch.full((positions, 1), -torch.inf, dtype=torch.float32, device=device)
        return cls(ids_PK, logprobs_PK, torch.zeros(positions, dtype=torch.float32, device=device))

    def __len__(self) -> int:
        return self.token_ids_PK.shape[0]

    @property
    def device(self) -> torch.device:
        return self.token_ids_PK.device

    def select(self, index: Tensor | slice) -> TeacherRows:
        """The rows at these positions: int64 indices or a boolean mask (copies), or a slice (views)."""
        return self._map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TeacherRows:
        """The same rows on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def contiguous(self) -> TeacherRows:
        """The same rows, as tensors without gaps; copied where they have some, as a smaller k's columns do."""
        return self._map(Tensor.contiguous)

    def within(self, vocab_size: int) -> tuple[TeacherRows, int]:
        """The rows of a smaller vocabulary, and how many entries were dropped, whose places become padding.

        What is left is the teacher given that the token is in the vocabulary: a row that lost something is divided by
        the mass of what it kept, of its tail as many shares as its tail samples.
        """
        lost_PK = self.token_ids_PK >= vocab_size
        dropped, lost_P = int(lost_PK.sum()), lost_PK.any(1)
        ids_PK = self.token_ids_PK.masked_fill(lost_PK, PAD_ID)
        logprobs_PK = self.logprobs_PK.masked_fill(ids_PK < 0, -torch.inf)
        log_tail_P, draws_PN = self.log_tail_mass_P, self.tail_token_ids_PN
        if draws_PN is not None:
            lost_PN = draws_PN >= vocab_size
            dropped, lost_P = dropped + int(lost_PN.sum()), lost_P | lost_PN.any(1)
            log_tail_P = log_tail_P + torch.log1p(-lost_PN.sum(1) / (draws_PN >= 0).sum(1).clamp(min=1))
            draws_PN = draws_PN.masked_fill(lost_PN, PAD_ID)
        if dropped == 0:
            return self, 0
        # Not 1 less what was lost: stored logprobs are rounded, and that may be more than 1.
        log_mass_P = torch.logaddexp(logprobs_PK.logsumexp(1), log_tail_P)
        log_mass_P = torch.where(lost_P & (log_mass_P > -torch.inf), log_mass_P, 0.0)
        kept = TeacherRows(ids_PK, logprobs_PK - log_mass_P[:, None], log_tail_P - log_mass_P, draws_PN, self.entropy_P)
        return kept, dropped

    def _map(self, change: Callable[[Tensor], Tensor]) -> TeacherRows:
        return TeacherRows(
            change(self.token_ids_PK),
            change(self.logprobs_PK),
            change(self.log_tail_mass_P),
            None if self.tail_token_ids_PN is None else change(self.tail_token_ids_PN),
            None if self.entropy_P is None else change(self.entropy_P),
        )
