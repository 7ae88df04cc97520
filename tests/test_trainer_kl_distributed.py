"""Two processes under wrappers that average gradients, against one process with the joint batch.

Shapes: P positions, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rank_processes import RANKS, Ranks
from test_trainer_kl_cases import Case, make_case
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from teachercache.trainer.kl import TeacherRows, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")


class Tiny(nn.Module):
    """A student whose forward gives the last hidden states, or the loss of its own head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"tie_word_embeddings": False}
        self.embedding = nn.Embedding(61, 7)
        self.body = nn.Linear(7, 7)
        self.lm_head = nn.Linear(7, 61)

    def forward(self, tokens_P: Tensor, loss: Callable[[Tensor, nn.Module], Tensor] | None = None) -> Tensor:
        hidden_PH = self.body(self.embedding(tokens_P)).tanh()
        return hidden_PH if loss is None else loss(hidden_PH, self.lm_head)


def tiny(*, adapted: bool) -> nn.Module:
    """The student in float64, its head as it is or with an adapter."""
    student: nn.Module = Tiny()
    if adapted:
        config = LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
        student = get_peft_model(student, config).base_model.model
        student.body.requires_grad_(True)
    return student.double()


# Which positions a rank has in each of its micro-batches: as unequal as can be.
SHARES = [[range(0, 9), range(9, 10)], [range(10, 13), range(13, 16)]]
# One of the ranks has nothing that counts, and must take part in the exchanges all the same.
IDLE = [[range(0, 16)], [range(0, 0)]]
TOTAL = 16


def teach(student: nn.Module, case: Case, shares: list[range], *, inside: bool, bare: bool, factor: float) -> float:
    """Gradients of the micro-batches, each normalised by the whole step's count; the sum of their losses."""
    tokens, total = torch.arange(TOTAL) * 5 % 61, 0.0
    for share in shares:
        # An empty share is a position that is masked.
        part = slice(share.start, max(share.stop, share.start + 1))
        rows = case.rows.select(part)
        chosen: dict[str, Any] = {"num_items": TOTAL}
        if len(share) == 0:
            chosen["position_weight"] = torch.zeros(1)

        def loss(hidden_PH: Tensor, head: Any, rows: TeacherRows = rows, chosen: dict[str, Any] = chosen) -> Tensor:
            if bare:
                return topk_kl(hidden_PH, head.weight, rows, bias=head.bias, **chosen)
            return topk_kl(hidden_PH, head, rows, **chosen)

        head = getattr(student, "module", student).lm_head
        value = student(tokens[part], loss) if inside else loss(student(tokens[part]), head)
        (value * factor).backward()
        total += value.item()
    return total


def parameter_gradients(student: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name."""
    found = {}
    for name, parameter in student.named_parameters():
        gradient = parameter.grad
        found[name.removeprefix("module.")] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def wrapped(
    rank: int, wrapper: str, case: Case, shares: list[list[range]], *, adapted: bool, inside: bool, bare: bool
) -> dict[str, Any]:
    """A rank's share of a data-parallel step; gradients are averages over ranks, so the loss is multiplied first."""
    student = tiny(adapted=adapted)
    if wrapper == "ddp":
        student = DistributedDataParallel(student)
    else:
        sizes = {"replicas": (RANKS, 1), "replicas of shards": (1, RANKS)}.get(wrapper)
        mesh = None if sizes is None else init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        if wrapper == "head of its own" or mesh is not None:
            fully_shard(student.lm_head, mesh=mesh)
        fully_shard(student, mesh=mesh, reshard_after_forward=wrapper == "resharded")
    sharded = wrapper != "ddp"
    assert isinstance(next(student.parameters()), DTensor) == sharded
    losses = teach(student, case, shares[rank], inside=inside, bare=bare, factor=RANKS)
    return {"losses": losses, "gradients": parameter_gradients(student)}


# The wrapper, whether the loss is called inside of the wrapped forward, and whether with the bare weight.
PLACES = [
    ("ddp", True, False),
    ("ddp", False, False),
    ("whole", True, False),
    ("whole", False, False),
    ("resharded", True, False),
    ("resharded", False, False),
    ("resharded", False, True),
    ("head of its own", True, False),
    ("head of its own", False, False),
    ("head of its own", False, True),
    ("replicas", False, False),
    ("replicas of shards", False, False),
]


def check_is_one_batch(ranks: Ranks, wrapper: str, shares: list[list[range]], **how: bool) -> None:
    """Losses and gradients of a data-parallel step are those of one process."""
    case = make_case(positions=TOTAL)
    alone = tiny(adapted=how["adapted"])
    loss = teach(alone, case, [range(TOTAL)], inside=how["inside"], bare=how["bare"], factor=1.0)
    expected = parameter_gradients(alone)
    assert all(gradient is not None for name, gradient in expected.items() if "lora" in name or "body" in name)
    found = ranks.run(wrapped, wrapper, case, shares, **how)
    assert sum(rank["losses"] for rank in found) == pytest.approx(loss)
    for rank in found:
        torch.testing.assert_close(rank["gradients"], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("wrapper", "inside", "bare", "adapted"),
    # A bare weight leaves adapters out.
    [(*place, adapted) for place in PLACES for adapted in (False, True) if not (place[2] and adapted)],
)
def test_ranks_with_unequal_shares_are_one_batch(
    ranks: Ranks, wrapper: str, inside: bool, bare: bool, adapted: bool
) -> None:
    check_is_one_batch(ranks, wrapper, SHARES, adapted=adapted, inside=inside, bare=bare)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("wrapper", ["ddp", "whole", "head of its own"])
def test_a_rank_without_a_position_that_counts(ranks: Ranks, wrapper: str, inside: bool) -> None:
    check_is_one_batch(ranks, wrapper, IDLE, adapted=False, inside=inside, bare=False)


def test_micro_batches_alone_are_one_batch() -> None:
    case = make_case(positions=TOTAL)
    student, alone = tiny(adapted=False), tiny(adapted=False)
    teach(student, case, [share for shares in SHARES for share in shares], inside=True, bare=False, factor=1.0)
    teach(alone, case, [range(TOTAL)], inside=True, bare=False, factor=1.0)
    torch.testing.assert_close(parameter_gradients(student), parameter_gradients(alone))


def frozen_head(rank: int, case: Case) -> bool:
    """Whether a sharded head that is frozen stays without a gradient, and hidden gets that of the whole."""
    student = tiny(adapted=False)
    expected, found = case.hidden[:, :7].clone().requires_grad_(), case.hidden[:, :7].clone().requires_grad_()
    topk_kl(expected, student.lm_head, case.rows).backward()
    student.requires_grad_(False)
    fully_shard(student)
    topk_kl(found, student.lm_head, case.rows).backward()
    assert expected.grad is not None
    return bool(torch.allclose(expected.grad, found.grad)) and student.lm_head.weight.grad is None


def test_a_frozen_head_in_shards(ranks: Ranks) -> None:
    assert ranks.run(frozen_head, make_case()) == [True, True]


def tensor_parallel(rank: int, case: Case) -> tuple[str, dict[str, Tensor | None]]:
    """What is said of a head that tensor parallelism has split, and what comes of following it."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    hidden = case.hidden.clone().requires_grad_()
    weight = nn.Parameter(distribute_tensor(case.weight, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="tensor-parallel") as caught:
        topk_kl(hidden, weight, case.rows)
    topk_kl(hidden, weight.to_local(), case.rows, vocab_group=mesh.get_group("tp")).backward()
    assert isinstance(weight.grad, DTensor)
    return str(caught.value), {"hidden": hidden.grad, "weight": weight.grad.full_tensor()}


def test_a_tensor_parallel_head_is_sent_to_vocab_group(ranks: Ranks) -> None:
    case = make_case(bias=False)
    expected = case.run()
    for said, found in ranks.run(tensor_parallel, case):
        assert "vocab_group" in said
        torch.testing.assert_close(found, {"hidden": expected.hidden, "weight": expected.weight})
