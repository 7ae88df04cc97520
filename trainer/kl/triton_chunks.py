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
from .packing import PackedPositions
from .stats import FIGURES

MAX_K = 4096
# Draws are compared with one another, in registers; more of them are for the torch path.
MAX_SAMPLES = 128
# Programs that share a position, entries that each reads at once, and its warps, by the logits' bytes. A gradient that
# is narrower than its logits moves through the memory of other parts: there must be one.
PARTS = {2: 16, 4: 16}
BLOCK = {2: 4096, 4: 4096}
WARPS = {2: 8, 4: 16}
NUM_FIGURES = len(FIGURES) - 1
# One program runs after the other there: none can wait for the next.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class TritonChunks:
    """Judges the chunks of one loss, of at most `rows` positions each, as `chunk.judge_chunk` does.

    Rows are checked on the way: `broken_R` tells afterwards which ones cannot be judged.
    """

    def __init__(
        self, packed: PackedPositions, scale: Tensor, rows: int, *, has_teacher: bool, with_stats: bool
    ) -> None:
        self._packed, self._scale = packed, scale
        self._has_teacher, self._with_stats = has_teacher, with_stats
        device, objective = scale.device, packed.objective
        self._draws_PN = packed.rows.tail_token_ids_PN if objective.tail == "sampled" else None
        self._k = packed.rows.token_ids_PK.shape[1]
        self._samples = 0 if self._draws_PN is None else self._draws_PN.shape[1]
        self.broken_R = torch.zeros(len(packed), dtype=torch.int8, device=device)
        self._z_CX = torch.empty(rows, self._k + self._samples + 1, device=device)
        self._log_p_CK = torch.empty(rows, self._k, device=device)
        self._scalars_C3 = torch.empty(rows, 3, device=device)
        self._parts_CS3 = torch.empty(rows, max(PARTS.values()), 3, device=device)
        self._arrived_C = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tickets = torch.zeros((), dtype=torch.int32, device=device)
        self._taken, self._turn = 0, 0

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
        packed, objective, rows = self._packed, self._packed.objective, self._packed.rows
        size, vocab_size = logits_CV.shape
        width = logits_CV.dtype.itemsize
        index_C = None if packed.positions_R is None else packed.positions_R[counted]
        labels_C = None if packed.labels_R is None else packed.labels_R[counted]
        loss_C = torch.empty(size, dtype=torch.float32, device=logits_CV.device)
        figures_CF = loss_C.new_empty(size, NUM_FIGURES) if self._with_stats else None
        parts = 1 if INTERPRETED or logits_CV.dtype != gradient_CV.dtype else PARTS[width]
        part_size = triton.cdiv(triton.cdiv(vocab_size, parts), BLOCK[width]) * BLOCK[width]
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
        sweep[(size * parts,)](
            logits_CV, logits_CV.stride(0), gradient_CV, gradient_CV.stride(0), bias_V, index_C, counted.start,
            rows.log_tail_mass_P, self._z_CX, self._log_p_CK, self._scalars_C3, self._parts_CS3, weight_C, self._scale,
            self._tickets, self._arrived_C, vocab_size, self._k, self._samples, part_size, self._taken, self._turn,
            float(objective.ce_weight), float(objective.beta), *map(float, shape),
            BLOCK=BLOCK[width], PARTS=parts, WITH_STATS=self._with_stats, WITH_GRADIENT=gradient,
            num_warps=WARPS[width], **where,
        )  # fmt: skip
        self._turn, self._taken = self._turn + 1, self._taken + size * parts
        judge[(size,)](
            gradient_CV, gradient_CV.stride(0), index_C, counted.start, rows.token_ids_PK, rows.log_tail_mass_P,
            self._draws_PN, rows.entropy_P, labels_C, self._z_CX, self._log_p_CK, self._scalars_C3, self._parts_CS3,
            weight_C, self._scale, loss_C, figures_CF, vocab_size, self._k, self._samples,
            float(objective.ce_weight), float(objective.beta), *map(float, shape),
            PARTS=parts, F=NUM_FIGURES, HAS_TEACHER=self._has_teacher, CE=objective.ce_weight > 0.0,
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
    multiply[(triton.cdiv(numbers.numel(), block),)](numbers, factor, out, numbers.numel(), BLOCK=block, num_warps=8)
    return out
