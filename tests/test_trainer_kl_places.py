"""Where the loss is called from: autocast, compiled and checkpointed models, a module of its own.

Shapes: P positions, H hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_trainer_kl_cases import TOLERANCE, make_case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from teachercache.trainer.kl import KLStats, TeacherRows, TopKKLLoss, topk_kl

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = make_case()


class Student(nn.Module):
    """A body of two layers under a head; gives the last hidden states."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7))
        self.lm_head = nn.Linear(7, 61)
        self.to(dtype)

    def forward(self, features_PH: Tensor) -> Tensor:
        hidden_PH: Tensor = self.body(features_PH)
        return hidden_PH


def step(student: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The loss of a step, and the gradients that it leaves."""
    student.zero_grad()
    loss = run()
    loss.backward()
    found = {name: parameter.grad for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert len(found) == 6 and all(gradient.any() for gradient in found.values())
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_under_autocast_it_is_no_worse_than_plain_pytorch(backward: Any) -> None:
    student, features = Student(), CASE.hidden.float()

    def run(impl: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
        def loss() -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
                if impl == "plain":
                    # the logits that a linear layer gives, through a head that is the identity
                    logits = student.lm_head(student(features)).float()
                    with torch.autocast("cpu", enabled=False):
                        return topk_kl(logits, torch.eye(61), CASE.rows, tail="bucket")
                return topk_kl(student(features), student.lm_head, CASE.rows, tail="bucket", backward=backward)

        return step(student, loss)

    actual, plain = run("auto", torch.bfloat16), run("plain", torch.bfloat16)
    student, features = copy.deepcopy(student).double(), features.double()
    truth = run("auto", None)
    assert all(value.dtype == torch.float32 for value in actual.values())
    for name, expected in truth.items():
        error, allowed = ((found[name].double() - expected).norm() for found in (actual, plain))
        assert 0 < error <= 1.5 * allowed + TOLERANCE[torch.bfloat16] * expected.norm(), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "way", [{"backward": "in_forward"}, {"backward": "recompute"}, {"return_stats": True}], ids=str
)
def test_a_compiled_model(way: dict[str, Any], inside: bool, backend: str) -> None:
    torch._dynamo.reset()
    student, features = Student(torch.float64), CASE.hidden

    def loss_of(body: nn.Module, rows: TeacherRows) -> Tensor:
        loss = topk_kl(body(features) * 2, student.lm_head, rows, tail="bucket", **way)
        return (loss[0] if isinstance(loss, tuple) else loss) * 3

    expected = step(student, lambda: loss_of(student, CASE.rows))
    if inside:
        compiled: Any = torch.compile(loss_of, backend=backend)
        actual = step(student, lambda: compiled(student, CASE.rows))
    else:
        body: Any = torch.compile(student, backend=backend, fullgraph=True)
        actual = step(student, lambda: loss_of(body, CASE.rows))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_checkpointed_model(backward: Any, reentrant: bool, whole: bool) -> None:
    student, features = Student(torch.float64), CASE.hidden.clone().requires_grad_()

    def loss_of(hidden: Tensor) -> Tensor:
        return topk_kl(hidden, student.lm_head, CASE.rows, backward=backward)

    def run() -> Tensor:
        if whole:
            return checkpoint(lambda x: loss_of(student(x)), features, use_reentrant=reentrant)  # type: ignore[no-any-return]
        return loss_of(checkpoint(student, features, use_reentrant=reentrant))

    torch.testing.assert_close(step(student, run), step(student, lambda: loss_of(student(features))))


def test_a_module_of_its_own() -> None:
    loss = TopKKLLoss(tail="bucket", ce_weight=0.3, softcap=4.0)
    assert repr(loss) == "TopKKLLoss(tail='bucket', ce_weight=0.3, softcap=4.0)"
    assert loss.state_dict() == {} and list(loss.parameters()) == []
    hidden, weight, _ = CASE.leaves(torch.float64)
    expected = topk_kl(hidden, weight, CASE.rows, tail="bucket", ce_weight=0.3, softcap=4.0, labels=CASE.labels)
    twin = copy.deepcopy(loss)
    torch.testing.assert_close(twin(hidden, weight, CASE.rows, labels=CASE.labels), expected)
    # A call's settings are the call's alone.
    other = loss(hidden, weight, CASE.rows, labels=CASE.labels, ce_weight=1.0, num_items=4)
    torch.testing.assert_close(
        other, topk_kl(hidden, weight, CASE.rows, labels=CASE.labels, ce_weight=1.0, num_items=4, softcap=4.0)
    )
    twin.options["ce_weight"] = 0.9
    torch.testing.assert_close(loss(hidden, weight, CASE.rows, labels=CASE.labels), expected)
    stats = TopKKLLoss(return_stats=True)(hidden, weight, CASE.rows)[1]  # type: ignore[call-arg]
    assert isinstance(stats, KLStats)


def test_a_setting_that_there_is_not_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="topk_kl has no setting tial"):
        TopKKLLoss(tial="bucket")  # type: ignore[call-arg]
