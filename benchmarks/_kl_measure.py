"""Time, peak memory and gradient error of the losses in benchmarks/kl.py."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from _kl_cases import Case, Variant, define, make_case, with_teacher_rows
from torch import Tensor

Cell = dict[str, Any]
Beside = tuple[Variant, int | None]

SLOW_MS = 3000.0
# The largest of 20,000 normal logits is 4 standard deviations up: 8, and 25.
SPREADS = {"flat": 2.0, "peaked": 6.2}


@dataclass
class Bench:
    """Measures cells, keeps them, and tells of each at once."""

    device: str
    deadline: float
    cells: list[Cell] = field(default_factory=list)

    def cell(
        self,
        variant: Variant,
        rows: int | None,
        case: Case,
        *,
        beside: Beside | None = None,
        repeats: int = 3,
        warm: bool = True,
    ) -> Cell:
        """Measure a variant in chunks of `rows`, each time right after the one `beside` it; slow ones once."""
        (positions, width), vocab = case.hidden_PH.shape, len(case.weight_VH)
        cell = {"variant": variant.name, "rows": rows, "group": variant.group, "N": positions, "D": width, "V": vocab}
        if time.monotonic() > self.deadline:
            cell["left_out"] = "no time was left"
        else:
            with recorded(cell):
                cell |= self._measure(variant, rows, case, beside, repeats, warm)
            self._release(case)
        self.cells.append(cell)
        print(json.dumps(cell), file=sys.stderr, flush=True)
        return cell

    def of(self, group: str, shape: tuple[int, int, int]) -> list[Cell]:
        """The cells of a group and shape that have been measured."""
        return [c for c in self.cells if c["group"] == group and (c["N"], c["D"], c["V"]) == shape and "ms" in c]

    def best(self, group: str, shape: tuple[int, int, int], limit_gb: float = float("inf")) -> Cell | None:
        """The fastest of them whose peak is no higher."""
        cells = [cell for cell in self.of(group, shape) if (cell["peak_gb"] or 0.0) <= limit_gb]
        return min(cells, key=lambda cell: cell["ms"], default=None)

    def _measure(
        self, variant: Variant, rows: int | None, case: Case, beside: Beside | None, repeats: int, warm: bool
    ) -> Cell:
        runs: list[Cell] = []
        others: list[Cell] = []
        for number in range(-1 if warm else 0, repeats):
            if beside is not None:
                others.append(self._once(*beside, case))
            runs.append(self._once(variant, rows, case))
            if number >= 0 and runs[-1]["ms"] > SLOW_MS:
                break
        runs, others = runs[warm:], others[warm:]
        times = [run["ms"] for run in runs]
        peaks = [run["peak_gb"] for run in runs]
        found = {"ms": statistics.median(times), "peak_gb": None if None in peaks else max(peaks)}
        found |= {"loss": runs[-1]["loss"], "runs_ms": [round(ms, 2) for ms in times]}
        return found | ({"gemm_ms": statistics.median(other["ms"] for other in others)} if others else {})

    def _once(self, variant: Variant, rows: int | None, case: Case) -> Cell:
        case.hidden_PH.grad = case.weight_VH.grad = None
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = variant.run(case, rows)
        if loss is not None:
            loss.backward()
        if on_gpu:
            torch.cuda.synchronize()
        return {
            "ms": (time.perf_counter() - begin) * 1e3,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
            "loss": None if loss is None else float(loss.detach()),
        }

    def _release(self, case: Case) -> None:
        case.hidden_PH.grad = case.weight_VH.grad = None
        gc.collect()
        if self.device == "cuda":
            # cuBLAS and cuBLASLt each keep 32 MiB once they were used: a loss would be charged for another's
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


@contextmanager
def recorded(cell: Cell) -> Iterator[None]:
    """Note in the cell what went wrong, so that the cells after it are still measured."""
    try:
        yield
    except torch.OutOfMemoryError:
        cell["oom"] = True
    except Exception as error:
        cell["error"] = repr(error)[:500]


def judge(variants: list[Variant], device: str, shape: tuple[int, int, int], rows: int) -> list[Cell]:
    """Each variant's error against float64 autograd of what it computes, relative, in chunks of `rows`."""
    judged = []
    for name, spread in SPREADS.items():
        student = make_case(*shape, device, spread)
        for entries in dict.fromkeys(variant.entries for variant in variants):
            case = with_teacher_rows(student, *entries)
            of_entries = [variant for variant in variants if variant.entries == entries]
            truths = {objective: _truth(objective, case) for objective in {variant.objective for variant in of_entries}}
            for variant in of_entries:
                cell: Cell = {"variant": variant.name, "logits": name, "of": (variant.objective, *entries)}
                with recorded(cell):
                    cell |= _errors(variant, rows, case, truths[variant.objective])
                judged.append(cell)
                print(json.dumps(cell), file=sys.stderr, flush=True)
    return judged


def _truth(objective: str, case: Case) -> dict[str, Tensor]:
    hidden_PH = case.hidden_PH.detach().double().requires_grad_()
    weight_VH = case.weight_VH.detach().double().requires_grad_()
    log_q_PV = (hidden_PH @ weight_VH.t()).log_softmax(1)
    loss = define(objective, log_q_PV, case.rows, case.labels_P).mean()
    gradients = torch.autograd.grad(loss, [hidden_PH, weight_VH])
    return dict(zip(("loss", "dH", "dW"), (loss.detach(), *gradients), strict=True))


def _errors(variant: Variant, rows: int, case: Case, truth: dict[str, Tensor]) -> Cell:
    case.hidden_PH.grad = case.weight_VH.grad = None
    loss = variant.run(case, rows)
    assert loss is not None
    loss.backward()
    found = {"loss": loss.detach(), "dH": case.hidden_PH.grad, "dW": case.weight_VH.grad}
    return {
        name: float((value.double() - truth[name]).norm() / truth[name].norm())
        for name, value in found.items()
        if value is not None
    }
