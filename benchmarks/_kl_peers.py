"""Other people's losses through the LM head, as far as they can be imported.

Each is given what ours is given, the sparse rows, and makes of them what it needs: time and memory of that count.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from _kl_cases import Case, Variant
from torch import Tensor

AXOLOTL = "axolotl.integrations.kd.kernels.liger"


def load_peers(folder: Path | None) -> tuple[list[Variant], dict[str, str]]:
    """The peers that are there, looked for in `folder` too; each package's version, or why it is missing."""
    if folder is not None:
        sys.path.append(str(folder.resolve(strict=True)))
    packages = {"liger-kernel": _liger, "cut-cross-entropy": _cut_cross_entropy, "axolotl": _axolotl}
    variants, found = [], {}
    for package, load in packages.items():
        try:
            variants += load()
            found[package] = metadata.version(package)
        except Exception as error:  # whatever a foreign package raises while it is imported
            found[package] = f"missing: {error!r}"[:300]
    return variants, found


def _liger() -> list[Variant]:
    fused_ce = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    fused_kl = importlib.import_module("liger_kernel.transformers.fused_linear_kl_div")

    def kl(case: Case, _: int | None) -> Tensor:
        rows = case.rows
        target_PV = case.hidden_PH.new_zeros(len(rows), len(case.weight_VH))
        target_PV.scatter_(1, rows.token_ids_PK.long(), rows.logprobs_PK.exp().to(target_PV.dtype))
        return fused_kl.LigerFusedLinearKLDivLoss()(case.hidden_PH, case.weight_VH, target_PV)

    def hard_labels(case: Case, _: int | None) -> Tensor:
        return fused_ce.LigerFusedLinearCrossEntropyLoss()(case.weight_VH, case.hidden_PH, case.labels_P)

    return [
        Variant("liger_kl", kl, "truncated", "liger_kl"),
        Variant("liger_hard_labels", hard_labels, "ce", "liger_hard_labels"),
    ]


def _cut_cross_entropy() -> list[Variant]:
    package = importlib.import_module("cut_cross_entropy")

    def hard_labels(case: Case, _: int | None) -> Tensor:
        return package.linear_cross_entropy(case.hidden_PH, case.weight_VH, case.labels_P)

    return [Variant("cce_hard_labels", hard_labels, "ce", "cce_hard_labels")]


def _axolotl() -> list[Variant]:
    module = _import_alone(AXOLOTL)

    def loss(*, compiled: bool) -> Callable[[Case, int | None], Tensor]:
        """As axolotl's trainer sets it up, which compiles it, and divides."""
        topk: Any = module.LigerFusedLinearKLTopKLogprobLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compute_ce_loss=False, normalize_topk=False,
            compiled=compiled,
        )  # fmt: skip

        def run(case: Case, _: int | None) -> Tensor:
            ids_PK = case.rows.token_ids_PK.long()
            per_row = (ids_PK, case.rows.logprobs_PK, ids_PK >= 0, case.labels_P)
            total = topk(case.weight_VH, case.hidden_PH[None], *(tensor[None] for tensor in per_row))
            return total / len(case.hidden_PH)

        return run

    return [
        Variant("axolotl", loss(compiled=True), "truncated", "axolotl"),
        Variant("axolotl_eager", loss(compiled=False), "truncated", "axolotl_eager"),
    ]


def _import_alone(name: str) -> ModuleType:
    """Import a module without what the packages around it import: these are stood in for by empty ones."""
    package, *rest = name.split(".")[:-1]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"no package {package}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    for part in (None, *rest):
        if part is not None:
            package, folder = f"{package}.{part}", folder / part
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
    return importlib.import_module(name)
