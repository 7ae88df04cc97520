"""Launches the Triton kernels on chunks of logits.

Shapes: C positions of the chunk, V vocabulary, K support entries, N tail samples, S parts, F figures.
"""

from __future__ import annotations

import os

import torch
import triton
from torch import Tensor

from .chunk import ChunkResult
from .kernel import judge, multiply, sweep, take_out
from .kernel_target import MISSING
from .packing import PackedPositions
from .stats import FIGURES

MAX_K = 4096
# Draws are compared with one another, in registers; more of them are for the torch path.
MAX_SAMPLES = 128
# Programs that share a position, a power of 2, entries that each reads at once, and its warps.
PARTS, BLOCK, WARPS = 16, 4096, 8
# A gradient that is narrower than its logits moves through the memory of other parts: there is one, of more warps.
ALONE_WARPS = 16
NUM_FIGURES = len(FIGURES) - 1
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class TritonChunks:
    """Judges the chunks of one loss, of at most `rows` positions each, as `chunk.judge_chunk` does.

    `same_memory` says that a gradient is as wide as its logit. Rows are checked on the way: `broken_R` tells afterwards
    which ones cannot be judged.
    """

    def __init__(
        self,
        packed: PackedPositions,
        scale: Tensor,
        rows: int,
        *,
        same_memory: bool,
        has_teacher: bool,
        with_stats: bool,
    ) -> None:
        self._packed, self._rows, self._scale = packed, packed.rows.contiguous(), scale
        self._has_teacher, self._with_stats = has_teacher, with_stats
        device, objective = scale.device, packed.objective
        self._draws_PN = self._rows.tail_token_ids_PN if objective.tail == "sampled" else None
        self._k = self._rows.token_ids_PK.shape[1]
        self._samples = 0 if self._draws_PN is None else self._draws_PN.shape[1]
        self.broken_R = torch.zeros(len(packed), dtype=torch.int8, device=device)
        self._z_CX = torch.empty(rows, self._k + self._samples + 1, device=device)
        self._log_p_CK = torch.empty(rows, self._k, device=device)
        self._scalars_C3 = torch.empty(rows, 3, device=device)
        # One program runs after the other in the interpreter: none can wait for the next.
        self._parts = PARTS if same_memory and not INTERPRETED else 1
        self._sums_CS = torch.empty(rows, self._parts, dtype=torch.int64, device=device)
        self._cross_CS = torch.empty(rows, self._parts, device=device)
        self._tickets = torch.zeros((), dtype=torch.int32, device=device)
        self._taken = 0

    def judge(
        self,
        logits_CV: Tensor,
        gradient_CV: Tensor,
        bias_V: Tensor | None,
        counted: slice,
        weight_C: Tensor,
        *,
        gradient: bool,
    ) -> ChunkResult:
        """The positions' losses; in `gradient_CV`, the logits' memory, the gradient of weight * scale * loss."""
        packed, objective, rows = self._packed, self._packed.objective, self._rows
        bias_V = None if bias_V is None else bias_V.contiguous()
        size, vocab_size = logits_CV.shape
        index_C = None if packed.positions_R is None else packed.positions_R[counted]
        labels_C = None if packed.labels_R is None else packed.labels_R[counted]
        loss_C = torch.empty(size, dtype=torch.float32, device=logits_CV.device)
        figures_CF = loss_C.new_empty(size, NUM_FIGURES) if self._with_stats else None
        self._sums_CS.fill_(MISSING.value)
        shape = (objective.logit_scale, objective.softcap or 1.0, objective.temperature)
        where = {
            "K_PADDED": triton.next_power_of_2(self._k),
            "DIVERGENCE": objective.divergence,
            "SHAPED": objective.logit_scale != objective.temperature or objective.softcap is not None,
            "CAPPED": objective.softcap is not None,
        }
        target = {"N_PADDED": triton.next_power_of_2(max(1, self._samples)), "TAIL": objective.tail}
        take_out[(size,)](
            logits_CV, logits_CV.stride(0), bias_V, index_C, counted.start, rows.token_ids_PK, rows.logprobs_PK,
            rows.log_tail_mass_P, self._draws_PN, rows.entropy_P, labels_C, self._z_CX, self._log_p_CK,
            self._scalars_C3, self.broken_R[counted], vocab_size, self._k, self._samples, *map(float, shape),
            HAS_TEACHER=self._has_teacher, num_warps=1, **where, **target,
        )  # fmt: skip
        sweep[(size * self._parts,)](
            logits_CV, logits_CV.stride(0), gradient_CV, gradient_CV.stride(0), bias_V, index_C, counted.start,
            rows.log_tail_mass_P, self._z_CX, self._log_p_CK, self._scalars_C3, self._sums_CS, self._cross_CS, weight_C,
            self._scale, self._tickets, vocab_size, self._k, self._samples, self._taken,
            float(objective.ce_weight), float(objective.beta), *map(float, shape),
            BLOCK=BLOCK, PARTS=self._parts, WITH_STATS=self._with_stats, WITH_GRADIENT=gradient,
            num_warps=WARPS if self._parts > 1 else ALONE_WARPS, **where,
        )  # fmt: skip
        self._taken += size * self._parts
        judge[(size,)](
            gradient_CV, gradient_CV.stride(0), index_C, counted.start, rows.token_ids_PK, rows.log_tail_mass_P,
            self._draws_PN, rows.entropy_P, labels_C, self._z_CX, self._log_p_CK, self._scalars_C3, self._sums_CS,
            self._cross_CS, weight_C, self._scale, loss_C, figures_CF, vocab_size, self._k, self._samples,
            float(objective.ce_weight), float(objective.beta), *map(float, shape),
            PARTS=self._parts, F=NUM_FIGURES, HAS_TEACHER=self._has_teacher, CE=objective.ce_weight > 0.0,
            WITH_STATS=self._with_stats, WITH_GRADIENT=gradient, num_warps=1, **where, **target,
        )  # fmt: skip
        sums_F = None
        if figures_CF is not None:
            if labels_C is None:
                figures_CF[:, FIGURES.index("ce")] = torch.nan
            sums_F = torch.cat([weight_C @ figures_CF, weight_C.sum(0, keepdim=True)])
        return ChunkResult(loss_C, sums_F, gradient_CV if gradient else None)


def scaled(numbers: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """numbers * factor, a 0-d tensor on the device, into `out`, which may be `numbers`: then a factor of 1 is free."""
    block = 4096
    grid, in_place = (triton.cdiv(numbers.numel(), block),), out is numbers
    multiply[grid](numbers, factor, out, numbers.numel(), BLOCK=block, IN_PLACE=in_place, num_warps=8)
    return out
