"""Which part of a host each replica gets: GPUs of its own, or a share of the cores."""

from __future__ import annotations

import os
from pathlib import Path

from .engines.vllm.options import num_cores
from .errors import InvalidSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"


def environments(replicas: int, gpus_each: int) -> list[dict[str, str]]:
    """Return what each replica's environment says about devices; a single one gets all there are.

    Raises:
        InvalidSettings: there are GPUs, but too few.
    """
    if replicas == 1:
        return [{}]
    gpus = visible_gpus()
    if not gpus:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // replicas))
        return [{"OMP_NUM_THREADS": threads}] * replicas
    if replicas * gpus_each > len(gpus):
        raise InvalidSettings(
            f"{replicas} replicas of {gpus_each} GPUs need {replicas * gpus_each}, and {len(gpus)} are visible: "
            f"ask for at most {len(gpus) // gpus_each} replicas"
        )
    return [{VISIBLE: ",".join(gpus[n * gpus_each : (n + 1) * gpus_each])} for n in range(replicas)]


def visible_gpus(folder: Path = Path("/dev")) -> list[str]:
    """Return the names of the GPUs that a worker would see, without loading what drives them."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    numbers = (path.name.removeprefix("nvidia") for path in folder.glob("nvidia*"))
    return sorted((number for number in numbers if number.isdecimal()), key=int)
