"""A head that is split over two processes by its vocabulary, against one process.

Shapes: V vocabulary, H hidden width, K support entries, N tail samples.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from rank_processes import Ranks
from test_trainer_kl_cases import FULL_MODES, SHAPED_MODES, Case, make_case, options
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from teachercache.trainer.kl import topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")

CASE: dict[str, Any] = {"positions": 11, "vocab": 61, "width": 7}
# So uneven that each rank would choose other chunks, were it alone.
PARTS = (40, 21)


def own_part(rank: int, whole: Tensor) -> Tensor:
    """This rank's rows of a head, as a leaf."""
    return whole.split(PARTS)[rank].clone().requires_grad_()


def learn(case: Case, weight: Tensor, bias: Tensor | None, upstream: Tensor | None, **chosen: Any) -> dict[str, Any]:
    """Loss, figures and gradients of a head, or of part of one."""
    hidden, _, _ = case.leaves(torch.float64)
    loss, stats = topk_kl(hidden, weight, case.rows, bias=bias, return_stats=True, **chosen)
    loss.backward(upstream)
    found = {"loss": loss.detach(), "stats": vars(stats), "hidden": hidden.grad, "weight": weight.grad}
    return found if bias is None else {**found, "bias": bias.grad}


def split_head(rank: int, case: Case, upstream: Tensor | None = None, **chosen: Any) -> dict[str, Any]:
    """What a rank finds that holds part of the head."""
    bias = None if case.bias is None else own_part(rank, case.bias)
    return learn(case, own_part(rank, case.weight), bias, upstream, vocab_group=dist.group.WORLD, **chosen)


def whole_head(case: Case, upstream: Tensor | None = None, **chosen: Any) -> dict[str, Any]:
    """What one process finds."""
    return learn(case, *case.leaves(torch.float64)[1:], upstream, **chosen)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks agree on, and their parts of the head one after the other."""
    shared = [{name: part[name] for name in ("loss", "stats", "hidden")} for part in parts]
    torch.testing.assert_close(shared[0], shared[1], rtol=0, atol=0, equal_nan=True)
    split = {name: torch.cat([part[name] for part in parts]) for name in ("weight", "bias") if name in parts[0]}
    return {**shared[0], **split}


def test_the_case_has_something_on_either_side() -> None:
    case = make_case(**CASE)
    assert case.rows.tail_token_ids_PN is not None
    for ids in (case.rows.token_ids_PK, case.rows.tail_token_ids_PN, case.labels):
        assert {bool(v < PARTS[0]) for v in ids.flatten().tolist() if v >= 0} == {True, False}
    assert sum(PARTS) == CASE["vocab"]


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
@pytest.mark.parametrize(("mode", "shape"), [both for both in SHAPED_MODES if both[0] in FULL_MODES])
def test_a_split_head_is_the_head(ranks: Ranks, mode: str, shape: str, backward: str) -> None:
    case = make_case(**CASE)
    chosen = options(case, mode, shape, backward=backward, chunk_bytes=3000)
    found = joined(ranks.run(split_head, case, **chosen))
    torch.testing.assert_close(found, whole_head(case, **chosen), rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("more", [{}, {"softcap": 3.0}, {"ce_weight": 0.3}], ids=str)
def test_a_split_head_s_loss_of_each_position(ranks: Ranks, more: dict[str, Any]) -> None:
    case, upstream = make_case(**CASE, bias=False), torch.arange(11.0).double().sin()
    chosen = options(case, "sampled", reduction="none", chunk_bytes=2000, **more)
    found = joined(ranks.run(split_head, case, upstream, **chosen))
    torch.testing.assert_close(found, whole_head(case, upstream, **chosen), rtol=1e-11, atol=1e-13, equal_nan=True)


def test_a_column_that_one_rank_s_bias_switches_off(ranks: Ranks) -> None:
    case = make_case(**CASE)
    assert case.bias is not None
    unused = [v for v in range(61) if v not in set(case.rows.token_ids_PK.flatten().tolist())]
    case.bias[[v for v in unused if v >= PARTS[0]]] = -torch.inf
    found = joined(ranks.run(split_head, case, tail="bucket"))
    torch.testing.assert_close(found, whole_head(case, tail="bucket"), rtol=1e-11, atol=1e-13, equal_nan=True)


class Exchanges(TorchDispatchMode):
    """Records the shapes of the floats that ranks exchange, by whatever collective."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.is_floating_point()]
            self.shapes += [tuple(x.shape) for x in tensors]
        return func(*args, **(kwargs or {}))


def exchanged(rank: int, case: Case, *, body: bool, head: bool, **chosen: Any) -> list[tuple[int, ...]]:
    """What ranks exchange of a loss and its gradients."""
    hidden = case.hidden.clone().requires_grad_(body)
    weight = own_part(rank, case.weight).detach().requires_grad_(head)
    with Exchanges() as recorded:
        loss = topk_kl(hidden, weight, case.rows, vocab_group=dist.group.WORLD, **chosen)
        if body or head:
            loss.backward()
    return recorded.shapes


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_ranks_exchange_a_few_numbers_a_position(ranks: Ranks, backward: str) -> None:
    case = make_case(**CASE, bias=False)
    # 5 entries and 3 draws; what exceeds whole chunks comes first
    chunk = [[(size, 8), (size, 1), (size, 1)] for size in (3, 4, 4)]
    walk = [shape for shapes in chunk for shape in shapes]
    both = {"tail": "sampled", "backward": backward, "chunk_bytes": 4 * 40 * 8}
    forward = walk if backward == "recompute" else []
    for shapes in ranks.run(exchanged, case, body=True, head=True, **both):
        assert shapes == [*forward, *walk, (11, 7)]
    for shapes in ranks.run(exchanged, case, body=False, head=True, **both):
        assert shapes == [*forward, *walk]
    for shapes in ranks.run(exchanged, case, body=False, head=False, **both):
        assert shapes == walk


def refusal(rank: int, case: Case, sizes: tuple[int, ...] = PARTS, **chosen: Any) -> str:
    """What is said of arguments that cannot be right."""
    weight = case.weight.split(sizes)[rank].clone().requires_grad_()
    with pytest.raises(ValueError, match=r".") as caught:
        topk_kl(case.hidden, weight, case.rows, **{"vocab_group": dist.group.WORLD, **chosen})
    return str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"tail": "renorm_both"}, "renorm_both"),
        ({"impl": "reference"}, "reference"),
        ({"sizes": (61, 0)}, r"must hold part of the head, but their rows are [61, 0]"),
        ({"grad_scale": 1.0, "vocab_group": None}, "grad_scale writes past DDP and FSDP"),
        ({"grad_scale": 1.0}, "grad_scale writes past DDP and FSDP"),
    ],
)
def test_all_ranks_refuse(ranks: Ranks, chosen: dict[str, Any], message: str) -> None:
    case = make_case(**CASE, bias=False)
    if chosen.get("vocab_group", ...) is None:
        chosen = {**chosen, "sizes": (61, 61)}
        case = Case(**{**vars(case), "weight": case.weight.repeat(2, 1)})
    for said in ranks.run(refusal, case, **chosen):
        assert message in said


def test_an_id_outside_all_parts_is_refused(ranks: Ranks) -> None:
    case = make_case(**CASE, bias=False)
    case.rows.token_ids_PK[3, 0] = 61
    for said in ranks.run(refusal, case):
        assert "student's vocabulary of 61: not so at position 3" in said


def adapted_part(rank: int, case: Case, whole: dict[str, Tensor], **chosen: Any) -> dict[str, Tensor | None]:
    """Gradients through a rank's part of a head with an adapter, whose A all ranks have."""
    parts = {name: tensor if "lora_A" in name else tensor.split(PARTS)[rank] for name, tensor in whole.items()}
    return learn_adapted(adapted(PARTS[rank], parts), case, vocab_group=dist.group.WORLD, **chosen)


def adapted(size: int, state: dict[str, Tensor]) -> nn.Module:
    student = nn.ModuleDict({"lm_head": nn.Linear(7, size, bias=False)})
    student.config = {"tie_word_embeddings": False}
    config = LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    head: nn.Module = get_peft_model(student, config).double().base_model.model["lm_head"]
    head.load_state_dict({**head.state_dict(), **state})
    return head


def learn_adapted(head: nn.Module, case: Case, **chosen: Any) -> dict[str, Tensor | None]:
    hidden, _, _ = case.leaves(torch.float64)
    topk_kl(hidden, head, case.rows, **chosen).backward()
    return {"hidden": hidden.grad, **{name: parameter.grad for name, parameter in head.named_parameters()}}


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_split_head_with_an_adapter(ranks: Ranks, backward: Any) -> None:
    case = make_case(**CASE)
    torch.manual_seed(0)
    head = adapted(61, {})
    expected = learn_adapted(head, case, backward=backward)
    first, second = ranks.run(adapted_part, case, head.state_dict(), backward=backward)
    for name in ("hidden", "lora_A.default.weight"):
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], expected[name])
    b = "lora_B.default.weight"
    torch.testing.assert_close(torch.cat([first[b], second[b]]), expected[b])
    assert first["base_layer.weight"] is None
