"""What is allocated: never a [positions, vocabulary] tensor, no gradient that nobody asked for, never much at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_trainer_kl_cases import FULL_MODES, MODES, make_case, options
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from teachercache.trainer.kl import chunk, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")

POSITIONS, VOCAB, WIDTH = 100, 4001, 16
# Rows of logits begin at multiples of 16 entries.
PADDED = 4016
CHUNK_BYTES = 240_000
HEAD_BYTES = VOCAB * WIDTH * 4
EXTRAS: dict[str, dict[str, Any]] = {"loss": {}, "stats": {"return_stats": True}, "capped": {"softcap": 3.0}}


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


def step(
    dtype: torch.dtype, mode: str = "bucket", *, head: bool = True, grad: bool = True, **more: Any
) -> Callable[[], None]:
    """Loss and gradients, ready to be computed."""
    case = make_case(POSITIONS, VOCAB, WIDTH, k=8, samples=4, bias=False)
    hidden, weight, _ = case.leaves(dtype)
    weight.requires_grad_(head)
    chosen = {"chunk_bytes": CHUNK_BYTES, **options(case, mode, **more)}

    def run() -> None:
        with torch.set_grad_enabled(grad):
            loss = topk_kl(hidden, weight, case.rows, **chosen)
            loss = loss[0] if isinstance(loss, tuple) else loss
            if grad:
                loss.backward()
        assert (weight.grad is not None) == (head and grad)

    return run


def allocations(run: Callable[[], None]) -> Allocations:
    with Allocations() as recorded:
        run()
    return recorded


def peak(run: Callable[[], None]) -> int:
    """Bytes that are held at worst beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_the_case_can_tell() -> None:
    assert HEAD_BYTES > CHUNK_BYTES
    dense = step(torch.float32, impl="reference")
    assert (POSITIONS, VOCAB) in allocations(dense).larger_than(HEAD_BYTES)
    assert peak(dense) > 3 * POSITIONS * VOCAB * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mode", FULL_MODES)
def test_only_the_head_s_gradient_is_larger_than_a_chunk(mode: str, extra: str, dtype: torch.dtype) -> None:
    recorded = allocations(step(dtype, mode, **EXTRAS[extra]))
    assert recorded.larger_than(CHUNK_BYTES) == {(VOCAB, WIDTH)}
    # The entropy's scratch and the cap's slope are a second buffer like the logits. The bound is made use of.
    widest = max(size for shape, size in recorded.shapes.items() if shape and shape[-1] in (VOCAB, PADDED))
    assert CHUNK_BYTES / 2 < widest * (1 if extra == "loss" else 2) <= CHUNK_BYTES * PADDED / VOCAB


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_held_at_once(mode: str, extra: str, backward: str) -> None:
    gradients = HEAD_BYTES + POSITIONS * WIDTH * 4
    # What a chunk's positions have by entry, and all have by position.
    small = 100 * POSITIONS
    assert peak(step(torch.float32, mode, backward=backward, **EXTRAS[extra])) <= gradients + CHUNK_BYTES + small


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in FULL_MODES])
def test_a_support_alone_needs_no_row_of_logits(mode: str) -> None:
    recorded = allocations(step(torch.float32, mode))
    assert {shape for shape in recorded.shapes if {VOCAB, PADDED} & set(shape)} == {(VOCAB, WIDTH)}
    assert recorded.larger_than(CHUNK_BYTES) == {(VOCAB, WIDTH)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize("mode", ["bucket", "renorm_both"])
def test_a_frozen_head_has_no_gradient_of_its_size(mode: str, backward: str, dtype: torch.dtype) -> None:
    recorded = allocations(step(dtype, mode, head=False, backward=backward))
    assert not recorded.larger_than(CHUNK_BYTES)
    assert (VOCAB, WIDTH) not in recorded.shapes


@pytest.mark.parametrize("mode", MODES)
def test_without_grad_only_the_loss_is_computed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(chunk, "write_gradient")
    recorded = allocations(step(torch.float32, mode, grad=False))
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
    assert {shape[0] for shape in recorded.shapes if shape[1:] in ((VOCAB,), (PADDED,))} == {3}


def test_a_chunk_holds_at_least_one_position() -> None:
    case = make_case(positions=5)
    assert case.run(chunk_bytes=1).loss == pytest.approx(float(case.run().loss))
