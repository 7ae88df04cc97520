"""Reads a pip installation report on stdin and prints which build of torch it names: `cpu` or `cuda`."""

import json
import sys
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

GPU_LIBRARIES = ("nvidia-", "cuda-", "triton-rocm", "pytorch-triton-rocm")


def build_of(report: dict[str, Any]) -> str:
    """Says `cuda` for any torch with GPU libraries: its local version or an applicable requirement shows it."""
    torch = next(item["metadata"] for item in report["install"] if item["metadata"]["name"] == "torch")
    local = Version(torch["version"]).local
    if local is not None:
        return "cpu" if local.startswith("cpu") else "cuda"
    needed = [Requirement(text) for text in torch.get("requires_dist", [])]
    gpu = [need for need in needed if need.name.startswith(GPU_LIBRARIES)]
    # An empty `extra` switches the optional requirements off.
    return "cuda" if any(need.marker is None or need.marker.evaluate({"extra": ""}) for need in gpu) else "cpu"


if __name__ == "__main__":
    print(build_of(json.load(sys.stdin)))
