"""What may stand for an LM head, above all one with adapters: the loss trains what calling the module would.

Shapes: P positions, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from test_trainer_kl_cases import Case, make_case
from test_trainer_kl_memory import Allocations
from torch import Tensor, nn

from teachercache.trainer.kl import topk_kl
from teachercache.trainer.kl.objective import Objective
from teachercache.trainer.kl.packing import pack
from teachercache.trainer.kl.reference import dense_loss

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = make_case()
WAYS: dict[str, dict[str, Any]] = {
    "in forward": {"backward": "in_forward"},
    "recomputed": {"backward": "recompute"},
    "reference": {"impl": "reference"},
    "support alone": {"tail": "renorm_both"},
}


class Student(nn.Module):
    """A body of nothing but the embedding, for peft to look into."""

    def __init__(self, case: Case = CASE, *, tied: bool = False) -> None:
        super().__init__()
        self.config = {"tie_word_embeddings": tied}
        vocab_size, width = case.weight.shape
        self.embedding = nn.Embedding(vocab_size, width, dtype=torch.float64)
        self.lm_head = nn.Linear(width, vocab_size, bias=case.bias is not None, dtype=torch.float64)
        with torch.no_grad():
            self.lm_head.weight.copy_(case.weight)
            if case.bias is not None:
                self.lm_head.bias.copy_(case.bias)
        if tied:
            self.lm_head.weight = self.embedding.weight


def adapted(*, seed: int = 0, case: Case = CASE, **config: Any) -> PeftModel:
    """A student whose head peft has wrapped; adapters begin with a B that is not 0."""
    torch.manual_seed(seed)
    chosen = {"target_modules": ["lm_head"], "r": 3, "lora_alpha": 5, "init_lora_weights": False, **config}
    return get_peft_model(Student(case), LoraConfig(**chosen)).double()


def defined(logits_PV: Tensor, case: Case, tail: Any = "bucket", **_: Any) -> Tensor:
    """The dense loss of what a head has given."""
    packed = pack(case.rows, None, None, ignore_index=-100, objective=Objective(tail), dtype=torch.float64)
    return dense_loss(logits_PV.double(), packed.part(slice(0, len(packed)))).mean()


def gradients(loss: Tensor, hidden: Tensor, head: nn.Module) -> dict[str, Tensor | None]:
    """Loss and gradients by name, those of the body and of each of the head's parameters; None where it gets none."""
    hidden.grad = None
    head.zero_grad()
    loss.backward()
    found = {name: parameter.grad for name, parameter in head.named_parameters()}
    return {"loss": loss.detach(), "hidden": hidden.grad, **found}


def assert_is_the_module(head: nn.Module, case: Case = CASE, **options: Any) -> dict[str, Tensor | None]:
    """The loss through a head against the dense loss of what calling it gives."""
    hidden, _, _ = case.leaves(torch.float64)
    chosen = {"tail": "bucket", **options}
    torch.manual_seed(7)
    actual = gradients(topk_kl(hidden, head, case.rows, **chosen), hidden, head)
    torch.manual_seed(7)
    expected = gradients(defined(head(hidden), case, **chosen), hidden, head)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)
    return actual


def trained(found: dict[str, Tensor | None]) -> set[str]:
    """What got a gradient other than 0."""
    return {name for name, gradient in found.items() if gradient is not None and bool(gradient.any())}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(bias: bool, way: str) -> None:
    case = make_case(bias=bias)
    found = assert_is_the_module(Student(case).lm_head, case, **WAYS[way])
    assert trained(found) == {"loss", "hidden", "weight"} | ({"bias"} if bias else set())


@pytest.mark.parametrize("way", WAYS)
def test_a_tied_embedding_is_reached_from_both_sides(way: str) -> None:
    case = make_case(bias=False)
    student, chosen = Student(case, tied=True), {"tail": "bucket", **WAYS[way]}
    tokens = torch.arange(len(case.hidden)) % 5
    from_head, from_body = student.lm_head.weight, student.embedding(tokens)
    total, *sides = (
        torch.autograd.grad(topk_kl(hidden, head, case.rows, **chosen), student.embedding.weight, retain_graph=True)[0]
        for hidden, head in (
            (from_body, student.lm_head),
            (from_body, from_head.detach()),
            (from_body.detach(), from_head),
        )
    )
    expected = torch.autograd.grad(defined(student.lm_head(from_body), case, **chosen), from_head)[0]
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(total, sides[0] + sides[1])
    assert all(side.any() for side in sides)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_an_adapter_is_trained_and_a_frozen_weight_is_not(dropout: float, way: str) -> None:
    head = adapted(lora_dropout=dropout).base_model.model.lm_head
    found = assert_is_the_module(head, **WAYS[way])
    assert trained(found) == {"loss", "hidden", "lora_A.default.weight", "lora_B.default.weight"}
    # Left out, as a bare `.weight` leaves it, the loss would be another.
    bare = topk_kl(CASE.hidden, head.weight, CASE.rows, bias=head.bias, tail=WAYS[way].get("tail", "bucket"))
    assert abs((bare - found["loss"]).item()) > 1e-3


def test_dropout_is_drawn_anew_and_sleeps_in_evaluation() -> None:
    head = adapted(lora_dropout=0.4).base_model.model.lm_head
    torch.manual_seed(1)
    first, second = (topk_kl(CASE.hidden, head, CASE.rows).item() for _ in range(2))
    assert first != second
    head.eval()
    first, second = (topk_kl(CASE.hidden, head, CASE.rows).item() for _ in range(2))
    assert first == second
    assert_is_the_module(head)


def test_an_unfrozen_weight_trains_beside_its_adapter() -> None:
    head = adapted().base_model.model.lm_head
    head.base_layer.requires_grad_(True)
    assert {"base_layer.weight", "base_layer.bias"} <= trained(assert_is_the_module(head))


@pytest.mark.parametrize("way", WAYS)
def test_two_active_adapters(way: str) -> None:
    student = adapted()
    config = LoraConfig(target_modules=["lm_head"], r=2, lora_alpha=7, use_rslora=True, init_lora_weights=False)
    student.add_adapter("other", config)
    head = student.double().base_model.model.lm_head
    only_first = trained(assert_is_the_module(head, **WAYS[way]))
    student.base_model.set_adapter(["default", "other"])
    both = trained(assert_is_the_module(head, **WAYS[way]))
    assert both - only_first == {"lora_A.other.weight", "lora_B.other.weight"}
    student.set_adapter("other")
    assert "lora_A.default.weight" not in trained(assert_is_the_module(head, **WAYS[way]))


def test_disabled_and_merged_adapters() -> None:
    student = adapted()
    head = student.base_model.model.lm_head
    active = assert_is_the_module(head)
    with student.disable_adapter():
        disabled = assert_is_the_module(head)
        assert trained(disabled) == {"loss", "hidden"}
    head.merge()
    merged = assert_is_the_module(head)
    torch.testing.assert_close(merged["loss"], active["loss"])
    assert trained(merged) == {"loss", "hidden"}
    # Merged and then disabled, peft's own forward takes the adapter out again.
    with student.disable_adapter():
        loss = topk_kl(CASE.hidden, head, CASE.rows, tail="bucket")
    torch.testing.assert_close(loss.detach(), disabled["loss"])
    assert not head.merged


def test_a_copy_that_peft_keeps_whole() -> None:
    student = adapted(target_modules=["embedding"], modules_to_save=["lm_head"])
    head = student.base_model.model.lm_head
    with torch.no_grad():
        head.modules_to_save["default"].weight.mul_(1.5)
    found = assert_is_the_module(head)
    copy = "modules_to_save.default"
    assert trained(found) == {"loss", "hidden", f"{copy}.weight", f"{copy}.bias"}
    with student.disable_adapter():
        assert trained(assert_is_the_module(head)) == {"loss", "hidden"}


def small_lora(**config: Any) -> Callable[[], nn.Module]:
    return lambda: adapted(**config).base_model.model.lm_head


def other_tuner(config: Any) -> nn.Module:
    student: Any = get_peft_model(Student(), config)
    head: nn.Module = student.base_model.model.lm_head
    return head


class Scaled(nn.Linear):
    """A layer that does something of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DoRA": (small_lora(use_dora=True), "adapter 'default' of the head is more than B A"),
    "an adapter with a bias": (small_lora(lora_bias=True), "adapter 'default' of the head is more than B A"),
    "IA3": (
        lambda: other_tuner(IA3Config(target_modules=["lm_head"], feedforward_modules=[])),
        r"LoRA-wrapped nn\.Linear, not peft\.tuners\.ia3\.layer\.Linear",
    ),
    "AdaLoRA": (
        lambda: other_tuner(AdaLoraConfig(target_modules=["lm_head"], total_step=10)),
        r"not peft\.tuners\.adalora\.layer\.SVDLinear",
    ),
    "tokens of their own": (
        lambda: other_tuner(LoraConfig(target_modules=["embedding"], trainable_token_indices={"lm_head": [1]})),
        r"not peft\..*TrainableTokensWrapper",
    ),
    "a layer with a forward of its own": (lambda: Scaled(7, 61), r"not test_trainer_kl_heads\.Scaled"),
    "a sequence": (lambda: nn.Sequential(nn.Linear(7, 61)), r"not torch\.nn\.modules\.container\.Sequential"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_train_silently_wrong_is_refused(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        topk_kl(CASE.hidden, make().double(), CASE.rows)


def test_a_bias_beside_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match="not a module and a bias"):
        topk_kl(CASE.hidden, Student().lm_head, CASE.rows, bias=CASE.bias)


def test_a_parametrized_layer_is_a_linear_layer() -> None:
    head = nn.utils.parametrizations.weight_norm(Student().lm_head)
    assert "parametrizations.weight.original1" in trained(assert_is_the_module(head))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bf16_head_with_adapters_in_float32(autocast: bool) -> None:
    """As peft keeps them: no gradient is further off than what calling the module gives, and of its own dtype."""
    student = adapted().bfloat16()
    head = student.base_model.model.lm_head
    for name, parameter in head.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    hidden = CASE.hidden.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = gradients(topk_kl(hidden, head, CASE.rows, tail="bucket"), hidden, head)
        plain = gradients(defined(head(hidden), CASE), hidden, head)
    dtypes = {name: None if gradient is None else gradient.dtype for name, gradient in actual.items()}
    wide = hidden.detach().double().requires_grad_()
    truth = gradients(defined(head.double()(wide), CASE), wide, head)
    assert dtypes["loss"] == dtypes["lora_A.default.weight"] == dtypes["lora_B.default.weight"] == torch.float32
    assert dtypes["hidden"] == torch.bfloat16
    for name, expected in truth.items():
        if expected is None:
            assert actual[name] is plain[name] is None
            continue
        error, allowed = ((found[name].double() - expected).norm() for found in (actual, plain))  # type: ignore[union-attr]
        assert error <= 1.5 * allowed + 1e-6, name


@pytest.mark.parametrize("backward", ["in_forward", "recompute"])
def test_a_frozen_weight_under_an_adapter_has_no_gradient_of_its_size(backward: Any) -> None:
    case = make_case(positions=50, vocab=4001, width=16, k=8, bias=False)
    head = adapted(case=case).base_model.model.lm_head
    hidden, _, _ = case.leaves(torch.float64)
    with Allocations() as recorded:
        topk_kl(hidden, head, case.rows, backward=backward, chunk_bytes=300_000).backward()
    assert head.lora_B["default"].weight.grad.any()
    assert (4001, 16) not in recorded.shapes
    assert recorded.larger_than(300_000) == set()


def test_the_weight_alone_is_the_layer() -> None:
    hidden, weight, bias = CASE.leaves(torch.float64)
    loss = topk_kl(hidden, weight, CASE.rows, bias=bias, tail="bucket")
    torch.testing.assert_close(loss, defined(F.linear(hidden, weight, bias), CASE))
