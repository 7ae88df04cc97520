"""How fast, small and exact the loss through the LM head is, beside plain torch, other people's losses, and its GEMMs.

A cell is one forward and backward of bf16 hidden states [N, D] through a bf16 head [V, D], both trained, against rows
of 100 entries. Milliseconds are the median of up to three runs after a first one; where the GEMMs alone were run
between them, theirs are in the cell as `gemm_ms`. Peaks count all tensors, inputs and gradients included. `rows` is a
chunk's positions, None what the loss takes by itself; ours rounds it down to a multiple of 192. Ratios of time are the
other's over ours, of memory ours over the other's, with the other at its fastest and at its smallest. Errors are
relative, to float64 autograd of the same objective.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _kl_cases import CE_WEIGHT, Case, K, Variant, dense_variants, make_case, plain_variants, with_random_rows
from _kl_measure import Bench, Cell, judge
from _kl_peers import load_peers
from _results import arguments, finish
from torch import Tensor

from teachercache.trainer.kl import topk_kl

# Of weight, hidden states and their gradients; beyond it no configuration is the best, but where it is float32's.
PEAK_LIMIT = 1.35
# What the figures of a group's best end in.
OURS = {"bucket": "", "exact": "_exact", "sampled": "_sampled", "sampled_100": "_sampled_100"}
SIZES = {
    "cuda": {"positions": "32768,8192,65536,262144", "width": 2880, "vocab": 201_088, "other_head": "4096,151936"},
    "cpu": {"positions": "64,32,128", "width": 32, "vocab": 503, "other_head": "48,509"},
}
# As many chunks as the headline has, and as in it a vocabulary that divides into whole tiles.
JUDGED = {"cuda": ((2048, 512, 20_096), 128), "cpu": ((64, 32, 503), 16)}
GRANULE = 4096


def our_variants(row_sizes: tuple[int | None, ...], impl: str) -> list[Variant]:
    """`topk_kl` with the settings that cost something."""
    narrow = {"logits_dtype": torch.bfloat16}
    lean = narrow | {"accumulator_dtype": torch.bfloat16}
    sampled = {"tail": "sampled", "objective": "sampled"}
    return [
        _ours("lean", impl, "bucket", row_sizes, **lean),
        _ours("narrow_logits", impl, "bucket", row_sizes, **narrow),
        _ours("narrow_accumulator", impl, "bucket", row_sizes, accumulator_dtype=torch.bfloat16),
        _ours("exact", impl, "exact", row_sizes),
        _ours("lean_frozen_head", impl, frozen=True, **lean),
        _ours("exact_frozen_head", impl, frozen=True),
        _ours("lean_ce_mix", impl, objective="mix", ce_weight=CE_WEIGHT, **lean),
        _ours("lean_stats", impl, return_stats=True, **lean),
        _ours("lean_recompute", impl, backward="recompute", **lean),
        _ours("exact_torch", "torch"),
        _ours("sampled_lean", impl, "sampled", row_sizes, entries=(16, 16), **sampled, **lean),
        _ours("sampled_exact", impl, entries=(16, 16), **sampled),
        _ours("sampled_100_lean", impl, "sampled_100", row_sizes, entries=(K, 16), **sampled, **lean),
    ]


def _ours(
    name: str, impl: str, group: str = "other", row_sizes: tuple[int | None, ...] = (None,), *,
    objective: str = "bucket", entries: tuple[int, int] = (K, 0), frozen: bool = False, tail: str = "bucket",
    **options: Any,
) -> Variant:  # fmt: skip
    def run(case: Case, rows: int | None) -> Tensor:
        itemsize = options.get("logits_dtype", torch.float32).itemsize
        loss = topk_kl(
            case.hidden_PH,
            case.weight_VH.detach() if frozen else case.weight_VH,
            case.rows,
            tail=tail,
            labels=case.labels_P if objective == "mix" else None,
            chunk_bytes=None if rows is None else rows * len(case.weight_VH) * itemsize,
            impl=impl,
            **options,
        )
        return loss[0] if isinstance(loss, tuple) else loss

    return Variant(name, run, objective, group, row_sizes, entries)


def sweep(bench: Bench, variants: list[Variant], shape: tuple[int, int, int], *, paired: bool) -> None:
    """Measure all variants at one size; `paired`, ours with the GEMMs between them."""
    inputs = make_case(*shape, bench.device)
    gemm = next((variant for variant in variants if variant.group == "gemm"), None)
    for entries in dict.fromkeys(variant.entries for variant in variants):
        case = with_random_rows(inputs, *entries)
        for variant in variants:
            for rows in variant.rows if variant.entries == entries else ():
                best = bench.best("gemm", shape)
                mine = paired and variant.group in OURS
                beside = (gemm, best["rows"]) if mine and gemm is not None and best is not None else None
                bench.cell(variant, rows, case, beside=beside)


def chosen(bench: Bench, shape: tuple[int, int, int]) -> dict[str, Cell]:
    """Our groups' best cells, and the GEMMs'."""
    limits = {group: float("inf") if group == "exact" else PEAK_LIMIT * floor_gb(shape) for group in OURS}
    cells = {group: bench.best(group, shape, limit) for group, limit in (limits | {"gemm": float("inf")}).items()}
    return {group: cell for group, cell in cells.items() if cell is not None}


def narrowed(variants: list[Variant], best: dict[str, Cell]) -> list[Variant]:
    """Of each group that has a best only that; other people's losses all; no single ones of ours."""
    names = {group: (cell["variant"], (cell["rows"],)) for group, cell in best.items()}
    kept = [v for v in variants if v.group != "other" and names.get(v.group, (v.name,))[0] == v.name]
    return [replace(v, rows=names[v.group][1]) if v.group in names else v for v in kept]


def largest(bench: Bench, variants: list[Variant], best: Cell, shape: tuple[int, int, int]) -> Cell | None:
    """Our best at the most positions that fit: what the line through two peaks foretells, and less until it does."""
    seen = sorted(
        (cell["N"], cell["peak_gb"], cell["ms"])
        for cell in bench.cells
        if "ms" in cell and all(cell[key] == best[key] for key in ("variant", "rows", "D", "V"))
    )
    if len({positions for positions, _, _ in seen}) < 2 or seen[-1][1] is None:
        return None
    torch.cuda.empty_cache()
    (few, low_gb, _), (many, high_gb, ms) = seen[0], seen[-1]
    variant = next(variant for variant in variants if variant.name == best["variant"])
    fits = many + (torch.cuda.mem_get_info()[0] / 1e9 - high_gb) * (many - few) / (high_gb - low_gb)
    for share in range(100, 70, -3):
        positions = int(fits * share / 100) // GRANULE * GRANULE
        if positions <= many or time.monotonic() + ms / 1e3 * positions / many > bench.deadline:
            return None
        try:
            case = with_random_rows(make_case(positions, *shape[1:], bench.device), *variant.entries)
        except torch.OutOfMemoryError:
            continue
        cell = bench.cell(variant, best["rows"], case, repeats=1, warm=False)
        del case
        if "oom" not in cell:
            return cell
    return None


def floor_gb(shape: tuple[int, int, int]) -> float:
    """Head, hidden states and their gradients in bf16."""
    positions, width, vocab = shape
    return 2 * 2 * width * (vocab + positions) / 1e9


def figures_of(bench: Bench, cell: Cell, errors: list[Cell], suffix: str) -> dict[str, Any]:
    """One of our cells, and its ratios to the floors, the GEMMs and the others."""
    shape = cell["N"], cell["D"], cell["V"]
    found = {"ours": f"{cell['variant']}, rows {cell['rows']}", "ours_ms": cell["ms"], "peak_gb": cell["peak_gb"]}
    if "gemm_ms" in cell:
        found |= {"gemm_ms": cell["gemm_ms"], "ratio_gemm": cell["ms"] / cell["gemm_ms"]}
    if cell["peak_gb"] is not None:
        found["ratio_floor"] = cell["peak_gb"] / floor_gb(shape)
    for group in dict.fromkeys(other["group"] for other in bench.cells):
        theirs = [] if group in (*OURS, "gemm", "other") else bench.of(group, shape)
        if theirs:
            found[f"ratio_{group}_ms"] = min(other["ms"] for other in theirs) / cell["ms"]
        if theirs and cell["peak_gb"] is not None:
            found[f"ratio_{group}_peak"] = cell["peak_gb"] / min(other["peak_gb"] for other in theirs)
    for peer in ("dense", "dense_fp32"):
        found[f"gradient_error{suffix}_over_{peer}"] = worst_over(errors, cell["variant"], peer)
    return {name if name.startswith("gradient") else name + suffix: value for name, value in found.items()}


def worst_over(errors: list[Cell], name: str, other: str) -> float | None:
    """The largest of a variant's gradient errors over another's, of the same objective, gradient and logits."""
    table = {(cell["variant"], cell["logits"], cell["of"]): cell for cell in errors}
    mine = [cell for cell in errors if cell["variant"] == name]
    pairs = [(cell, table.get((other, cell["logits"], cell["of"]), {})) for cell in mine]
    return max((a[key] / b[key] for a, b in pairs for key in ("dH", "dW") if key in a and key in b), default=None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every figure."""
    others, peers = load_peers(args.peers)
    row_sizes = (None, *(int(rows) for rows in args.rows.split(",")))
    variants = [*plain_variants(), *our_variants(row_sizes, args.impl), *others]
    if args.only:
        variants = [variant for variant in variants if variant.name in args.only.split(",")]
    bench = Bench(args.device, time.monotonic() + args.seconds)
    headline, *more = (int(positions) for positions in args.positions.split(","))
    shape = headline, args.width, args.vocab

    sweep(bench, variants, shape, paired=True)
    best = chosen(bench, shape)
    fewer = narrowed(variants, best)
    # The fastest of many is also the luckiest: what is reported of it is measured once more.
    again = Bench(args.device, bench.deadline)
    sweep(again, [variant for variant in fewer if variant.group in best], shape, paired=True)
    losses = [variant for variant in variants if variant.group not in ("gemm", "online", "dense")]
    exact = [v for of in dict.fromkeys((loss.objective, loss.entries) for loss in losses) for v in dense_variants(*of)]
    errors = judge(exact + losses, args.device, *JUDGED[args.device])
    if args.other_head:
        width, vocab = (int(size) for size in args.other_head.split(","))
        sweep(bench, fewer, (headline, width, vocab), paired=True)
    for positions in more:
        sweep(bench, fewer, (positions, *shape[1:]), paired=False)

    figures: dict[str, Any] = {"shape": shape, "floor_gb": floor_gb(shape), "peers": peers}
    for group, suffix in OURS.items():
        if group in best:
            cell = again.best(group, shape) or best[group]
            figures |= figures_of(bench, cell, errors, suffix)
    if "bucket" in best:
        for positions in more:
            cell = bench.best("bucket", (positions, *shape[1:]))
            figures |= {f"{key}_{positions}": cell[key] for key in ("ms", "peak_gb")} if cell else {}
        figures["largest"] = largest(bench, fewer, best["bucket"], shape)
    return figures | {"errors": errors, "cells": bench.cells + again.cells}


def options() -> argparse.Namespace:
    """The command line; sizes are an H200's, and smaller without a GPU."""
    parser = arguments("Time, memory and gradient error of the loss, beside plain torch, other people's and its GEMMs.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(SIZES), default=device)
    parser.add_argument("--positions", help="N, the headline's first (cuda: 32768,8192,65536,262144)")
    parser.add_argument("--width", type=int, help="D (cuda: 2880)")
    parser.add_argument("--vocab", type=int, help="V (cuda: 201088)")
    parser.add_argument("--other-head", help="D,V of a second head, at the first N, or '' (cuda: 4096,151936)")
    parser.add_argument("--rows", default="1024,2048,4096", help="positions of our chunks (default: 1024,2048,4096)")
    parser.add_argument("--only", default="", help="names of variants, comma-separated (default: all)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where liger-kernel and others are, if not installed")
    parser.add_argument("--impl", default="auto", help="of topk_kl, but for exact_torch (default: auto)")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which no cell is begun (default: 420)")
    args = parser.parse_args()
    for name, value in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    args = options()
    packages = ["torch", *(["triton"] if importlib.util.find_spec("triton") else [])]
    figures = measure(args)
    finish("kl", figures, packages, args)
    broken = [cell for cell in figures["cells"] if "error" in cell and cell["group"] in (*OURS, "gemm", "other")]
    if broken:
        raise SystemExit(f"{len(broken)} cells of ours failed, the first: {broken[0]}")
