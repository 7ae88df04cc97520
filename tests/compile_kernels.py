"""Compiles the loss's kernels for GPUs that need not be there, in a process of its own: the interpreter must be off.

Each launch of `TritonChunks` stops after compilation; prints the kernels and how many machine codes each gave.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import triton
from test_trainer_kl_cases import make_case, options
from test_trainer_kl_triton import Chunk
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from teachercache.trainer.kl.objective import Objective
from teachercache.trainer.kl.packing import pack
from teachercache.trainer.kl.triton_chunks import INTERPRETED, scaled

CAPABILITIES = (80, 90)
LAUNCHES = [
    ("sampled", "everything", torch.bfloat16, torch.bfloat16),
    ("jsd-bucket", "capped", torch.float32, torch.bfloat16),
]


class Absent:
    """A driver that says it has a GPU."""

    capability = CAPABILITIES[0]

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def main() -> None:
    assert not INTERPRETED
    driver, launch, codes = Absent(), JITFunction.run, defaultdict(set)
    triton.runtime.driver.set_active(driver)

    def compile_only(kernel: JITFunction[Any], *args: Any, warmup: bool, **options: Any) -> None:
        compiled = launch(kernel, *args, warmup=True, **options)
        assert f".target sm_{driver.capability}" in compiled.asm["ptx"]
        codes[kernel.fn.__name__].add(compiled.asm["cubin"])

    JITFunction.run = compile_only
    for driver.capability in CAPABILITIES:
        for mode, shape, dtype, gradient in LAUNCHES:
            case = make_case(3, 301, 7)
            chosen = options(case, mode, shape)
            labels = chosen.pop("labels", None)
            packed = pack(
                case.rows, None, labels, ignore_index=-100, objective=Objective(**chosen), dtype=torch.float32
            )
            Chunk(torch.zeros(len(packed), 301), dtype, gradient).judge(packed)
        scaled(torch.zeros(5), torch.ones(()), torch.zeros(5))
    print({name: len(found) for name, found in codes.items()})


if __name__ == "__main__":
    main()
