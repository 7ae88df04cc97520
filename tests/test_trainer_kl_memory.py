"""What is allocated: never a [positions, vocabulary] tensor, and no gradient that nobody asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_trainer_kl_cases import TAILS, make_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from teachercache.trainer.kl import fused, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")

POSITIONS, VOCAB, WIDTH = 100, 1009, 32
CHUNK_BYTES = 60_000
HEAD_BYTES = VOCAB * WIDTH * 4


class Allocations(TorchDispatchMode):
    """Records what operators give back in memory that they were not given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        for x in tree_flatten(result)[0]:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.shapes[tuple(x.shape)] = max(self.shapes.get(tuple(x.shape), 0), x.untyped_storage().nbytes())
        return result

    def larger_than(self, size: int) -> set[tuple[int, ...]]:
        return {shape for shape, nbytes in self.shapes.items() if nbytes > size}


def allocations(dtype: torch.dtype, *, head: bool = True, grad: bool = True, **options: Any) -> Allocations:
    case = make_case(POSITIONS, VOCAB, WIDTH, k=8, samples=4, bias=False)
    hidden, weight, _ = case.leaves(dtype)
    weight.requires_grad_(head)
    with Allocations() as recorded, torch.set_grad_enabled(grad):
        loss = topk_kl(hidden, weight, case.rows, chunk_bytes=CHUNK_BYTES, **options)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if grad:
            loss.backward()
    assert (weight.grad is not None) == (head and grad)
    return recorded


def test_the_case_can_tell() -> None:
    assert HEAD_BYTES > CHUNK_BYTES
    assert (POSITIONS, VOCAB) in allocations(torch.float32, impl="reference").larger_than(HEAD_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stats", [False, True], ids=["loss", "stats"])
@pytest.mark.parametrize("tail", TAILS)
def test_only_the_head_s_gradient_is_larger_than_a_chunk(tail: str, stats: bool, dtype: torch.dtype) -> None:
    recorded = allocations(dtype, tail=tail, return_stats=stats)
    assert recorded.larger_than(CHUNK_BYTES) == {(VOCAB, WIDTH)}
    # The entropy's scratch is a second buffer like the logits. Both are in the bound, and make use of it.
    widest = max(size for shape, size in recorded.shapes.items() if shape[-1:] == (VOCAB,))
    assert CHUNK_BYTES / 2 < widest * (1 + stats) <= CHUNK_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", ["head", "all"])
def test_a_frozen_head_has_no_gradient_of_its_size(dtype: torch.dtype, frozen: str) -> None:
    recorded = allocations(dtype, head=False, grad=frozen == "head")
    assert not recorded.larger_than(CHUNK_BYTES)
    assert (VOCAB, WIDTH) not in recorded.shapes


def test_without_grad_only_the_loss_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fused, "write_gradient")
    recorded = allocations(torch.float32, grad=False)
    assert not recorded.larger_than(CHUNK_BYTES)
    assert (POSITIONS, WIDTH) not in recorded.shapes


def test_a_frozen_body_has_no_hidden_gradient() -> None:
    case = make_case(POSITIONS, VOCAB, WIDTH, bias=False)
    hidden, weight, _ = case.leaves(torch.float32)
    with Allocations() as recorded:
        topk_kl(hidden.detach(), weight, case.rows, chunk_bytes=CHUNK_BYTES).backward()
    assert weight.grad is not None
    assert (POSITIONS, WIDTH) not in recorded.shapes


def test_masked_positions_cost_no_gemm() -> None:
    case = make_case(POSITIONS, VOCAB, WIDTH, bias=False)
    hidden, weight, _ = case.leaves(torch.float32)
    mask = torch.zeros(POSITIONS)
    mask[::40] = 1
    with Allocations() as recorded:
        topk_kl(hidden, weight, case.rows, position_weight=mask).backward()
    assert {shape[0] for shape in recorded.shapes if shape[1:] == (VOCAB,)} == {3}


def test_a_chunk_holds_at_least_one_position() -> None:
    case = make_case(positions=5)
    assert case.run(chunk_bytes=1).loss == pytest.approx(float(case.run().loss))
