"""Training from a cache: what it does to a student, and that a crash, a split or a bad input changes nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_cache import VOCAB, save_student, tiny_model, tiny_sequences, write_cache

from teachercache.client import IntegrityError, stream_topk
from teachercache.format_spec import TeachercacheError
from teachercache.format_spec.tokenizer_identity import tokenizer_digest
from teachercache.trainer import Student, TrainConfig, prune, train
from teachercache.trainer.batch import micro_batches, to_tensors
from teachercache.trainer.errors import (
    CheckpointError,
    Diverged,
    InvalidConfig,
    NothingToTrainOn,
    TokenizerMismatch,
    UnsupportedStudent,
)
from teachercache.trainer.kl import TeacherRows, topk_kl
from teachercache.trainer.metrics import read_metrics


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_student(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, student: Path) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    return write_cache(folder / "pulled", tiny_sequences(), tokenizer=tokenizer_digest(student))


def config(student: Path, cache: Path, output: Path, **changes: Any) -> TrainConfig:
    settings = {"batch_size": 6, "epochs": 3, "learning_rate": 1e-2, "checkpoint_every": 4, "device": "cpu"}
    return TrainConfig(student=str(student), cache=str(cache), output=output, **(settings | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tail": "bucket"},
        {"tail": "truncated"},
        {"ce_weight": 0.3},
        {"ce_weight": 1.0},
        {"tail": "to_label"},
        {"tail": "renorm", "temperature": 2.0, "t2_scaling": True},
        {"tail": "renorm_both"},
        {"tail": "bucket", "divergence": "jsd", "beta": 0.3},
    ],
)
def test_training_lowers_the_loss_and_leaves_a_student(
    tmp_path: Path, student: Path, cache: Path, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    seen = []
    result = train(
        config(student, cache, tmp_path, epochs=12, **changes), lambda m, steps: seen.append((m.step, steps))
    )
    metrics = read_metrics(result.metrics)
    assert seen == [(i + 1, 48) for i in range(48)]
    assert [m.step for m in metrics] == list(range(1, 49))
    assert np.mean([m.loss for m in metrics[-4:]]) < 0.9 * np.mean([m.loss for m in metrics[:4]])
    assert result.plot.read_bytes().startswith(b"\x89PNG")
    again = AutoModelForCausalLM.from_pretrained(result.student)
    assert again.config.vocab_size == VOCAB
    assert (result.student / "tokenizer.json").exists()


def test_the_student_comes_near_the_teacher(tmp_path: Path, student: Path, cache: Path) -> None:
    """The full-vocabulary KL to the bigram teacher falls, and from the tail samples it falls further than truncated."""
    from transformers import AutoModelForCausalLM

    table = torch.from_numpy(np.random.default_rng(99).normal(size=(VOCAB, VOCAB)) * 3).log_softmax(-1)
    ids = torch.arange(VOCAB)[:, None]

    def kl(folder: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            q = model(ids).logits[:, 0].double().log_softmax(-1)
        return float((table.exp() * (table - q)).sum(-1).mean())

    before = kl(student)
    after = {
        tail: kl(train(config(student, cache, tmp_path / tail, epochs=40, tail=tail)).student)
        for tail in ("sampled", "truncated")
    }
    assert after["sampled"] < 0.6 * before
    assert after["sampled"] < after["truncated"]


def test_unequal_micro_batches_give_the_gradient_of_one_batch(tmp_path: Path, student: Path, cache: Path) -> None:
    runs = {}
    for size in (None, 1, 4, 5):
        result = train(config(student, cache, tmp_path / str(size), micro_batch_size=size, max_steps=3))
        runs[size] = (Student.load(str(result.student), device="cpu").model.state_dict(), read_metrics(result.metrics))
    weights, metrics = runs[None]
    for size in (1, 4, 5):
        for name, value in runs[size][0].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
        for a, b in zip(runs[size][1], metrics, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-5)
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
            assert a.tail_share == pytest.approx(b.tail_share, rel=1e-3)


def test_micro_batches_cut_padding_but_no_row(cache: Path) -> None:
    with stream_topk(cache, batch_size=7) as stream:
        for batch in stream:
            parts = list(micro_batches(batch, 2))
            assert [len(part) for part in parts] == [2, 2, 2, 1]
            assert sum(part.counted_BP.sum() for part in parts) == batch.counted_BP.sum()
            whole, pieces = to_tensors(batch, "cpu"), [to_tensors(part, "cpu") for part in parts]
            for name in ("token_ids_PK", "logprobs_PK", "tail_token_ids_PN", "entropy_P", "log_tail_mass_P"):
                joined = torch.cat([getattr(piece.rows, name) for piece in pieces])
                torch.testing.assert_close(joined, getattr(whole.rows, name))
            assert all(part.input_ids_BT.shape[1] <= batch.input_ids_BT.shape[1] for part in parts)


def test_rows_and_labels_are_aligned(cache: Path) -> None:
    """Row i predicts token i + 1: the label of a row is the next token, the support that of the bigram table's row."""
    table = np.random.default_rng(99).normal(size=(VOCAB, VOCAB)) * 3
    with stream_topk(cache, batch_size=3, shuffle=False) as stream:
        batch = next(stream)
    tensors = to_tensors(batch, "cpu")
    current = batch.input_ids_BT[:, :-1][batch.counted_BP]
    np.testing.assert_array_equal(tensors.labels_R.numpy(), batch.input_ids_BT[:, 1:][batch.counted_BP])
    np.testing.assert_array_equal(tensors.rows.token_ids_PK[:, 0].numpy(), table[current].argmax(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_learns_what_the_cpu_learns(tmp_path: Path, student: Path, cache: Path, dtype: str) -> None:
    on_cpu = read_metrics(train(config(student, cache, tmp_path / "cpu", epochs=6)).metrics)
    on_gpu = read_metrics(train(config(student, cache, tmp_path / "gpu", epochs=6, device="cuda", dtype=dtype)).metrics)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    assert [m.loss for m in on_gpu] == pytest.approx([m.loss for m in on_cpu], rel=tolerance)


class Killed(Exception):
    """Stands for the power cut."""


@pytest.mark.parametrize("killed_at", [3, 4, 6, 11])
def test_a_killed_run_continues_its_exact_loss_curve(
    tmp_path: Path, student: Path, cache: Path, killed_at: int
) -> None:
    whole = train(config(student, cache, tmp_path / "whole"))

    def kill(metrics: Any, steps: int) -> None:
        if metrics.step == killed_at:
            raise Killed

    with pytest.raises(Killed):
        train(config(student, cache, tmp_path / "cut"), kill)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    cut = train(config(student, cache, tmp_path / "cut"))
    expected, got = read_metrics(whole.metrics), read_metrics(cut.metrics)
    assert [m.loss for m in got] == [m.loss for m in expected]
    weights = [(run.student / "model.safetensors").read_bytes() for run in (whole, cut)]
    assert weights[0] == weights[1]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path, student: Path, cache: Path) -> None:
    train(config(student, cache, tmp_path))
    with pytest.raises(CheckpointError, match="learning_rate"):
        train(config(student, cache, tmp_path, learning_rate=1e-3))


def test_a_half_written_checkpoint_is_not_one(tmp_path: Path, student: Path, cache: Path) -> None:
    partial = tmp_path / "checkpoints" / ".step-8.partial"
    partial.mkdir(parents=True)
    (partial / "tensors.pt").write_bytes(b"half")
    assert train(config(student, cache, tmp_path)).steps == 12
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"epochs": 0},
        {"tail": "tails"},
        {"dtype": "float8"},
        {"ce_weight": 1.5},
        {"learning_rate": 0.0},
        {"micro_batch_size": 0},
        {"max_steps": 0},
        {"warmup_fraction": 1.0},
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(change))):
        config(tmp_path / "nowhere", tmp_path / "nowhere", tmp_path, **change)


def test_a_cache_of_another_tokenizer_is_refused(tmp_path: Path, cache: Path) -> None:
    other = save_student(tmp_path / "other", tokenizer={"model": {"vocab": {"a": 0}}, "version": "1.0"})
    with pytest.raises(TokenizerMismatch, match="another tokenizer"):
        train(config(other, cache, tmp_path / "out"))
    (other / "tokenizer.json").unlink()
    with pytest.raises(TokenizerMismatch, match="no tokenizer"):
        train(config(other, cache, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    train(config(other, cache, tmp_path / "out", check_tokenizer=False, max_steps=1))


def test_students_that_cannot_be_trained_right_are_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UnsupportedStudent, match="no folder"):
        Student.load(str(tmp_path / "nowhere"), device="cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedStudent, match="cannot load"):
        Student.load(str(tmp_path / "empty"), device="cpu")
    small = save_student(tmp_path / "small", tiny_model(vocab_size=VOCAB - 1))
    with pytest.raises(TeachercacheError, match="vocabulary"):
        train(config(small, cache, tmp_path / "out", check_tokenizer=False))


def test_logits_that_nobody_expects_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capped = save_student(tmp_path, tiny_model("gemma2", final_logit_softcapping=0.01))
    monkeypatch.setattr(Student, "softcap", None)
    with pytest.raises(UnsupportedStudent, match="scaled by 1 and not capped: it does more to them"):
        Student.load(str(capped), device="cpu")


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("gemma2", {"final_logit_softcapping": 0.05}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("cohere", {"logit_scale": 0.25}),
    ("granite", {"logits_scaling": 8.0}),
    ("gpt2", {}),
    ("opt", {}),
    ("opt", {"word_embed_proj_dim": 8}),
    ("phi", {}),
]


@pytest.mark.parametrize(("kind", "settings"), HEADS)
def test_the_loss_is_that_of_the_models_own_logits(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """Scaled, capped, tied, biased and projected heads: loss and gradients are those of KL from model(ids).logits."""
    model = tiny_model(kind, **settings)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(30)
        if head.bias is not None:
            head.bias.normal_()
    student = Student.load(str(save_student(tmp_path, model)), device="cpu")
    student.model.eval()
    ids_BT = torch.randint(0, VOCAB, (2, 9))
    # a teacher that tells all it knows
    teacher_PV = torch.randn(18, VOCAB).log_softmax(-1)
    order = teacher_PV.sort(descending=True)
    rows = TeacherRows(order.indices, order.values, torch.full((18,), -torch.inf))
    loss = topk_kl(
        student.hidden_BTH(ids_BT).flatten(0, 1),
        student.head,
        rows,
        tail="bucket",
        logit_scale=student.logit_scale,
        softcap=student.softcap,
    )
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in student.model.named_parameters()}
    student.model.zero_grad()
    logprobs_PV = student.model(ids_BT).logits.flatten(0, 1).log_softmax(-1)
    dense = (teacher_PV.exp() * (teacher_PV - logprobs_PV)).sum(-1).mean()
    dense.backward()
    torch.testing.assert_close(loss, dense, rtol=1e-4, atol=1e-5)
    for name, parameter in student.model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_pruning_keeps_the_layers_named(kind: str) -> None:
    model = tiny_model(kind, layers=4).eval()
    ids = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(prune(model, range(4)).eval()(ids).logits, model(ids).logits)
        pruned = prune(model, [0, 2])
        assert pruned.config.num_hidden_layers == 2
        state, source = pruned.state_dict(), model.state_dict()
        assert len(state) < len(source)
        moved = [name for name in state if ".1." in name]
        assert moved
        for name, value in state.items():
            torch.testing.assert_close(value, source[name.replace(".1.", ".2.")])
    for wrong in ([], [4], [-1, 0]):
        with pytest.raises(UnsupportedStudent, match="cannot keep layers"):
            prune(model, wrong)


def test_a_damaged_shard_ends_the_run_with_a_clear_error(tmp_path: Path, student: Path) -> None:
    cache = write_cache(tmp_path / "pulled", tiny_sequences(), tokenizer=tokenizer_digest(student))
    shard = next((cache / "shards").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(TeachercacheError) as caught:
        train(config(student, cache, tmp_path / "out"))
    assert isinstance(caught.value, IntegrityError) or "checksum" in str(caught.value)


def test_nothing_to_train_on_and_a_diverging_run_say_so(tmp_path: Path, student: Path, cache: Path) -> None:
    masked = [dataclasses.replace(s, loss_mask_L=np.zeros(len(s), bool)) for s in tiny_sequences(6)]
    empty = write_cache(tmp_path / "masked", masked, tokenizer=tokenizer_digest(student))
    with pytest.raises(NothingToTrainOn):
        train(config(student, empty, tmp_path / "a"))
    with pytest.raises(Diverged, match="lower the learning rate"):
        train(config(student, cache, tmp_path / "b", learning_rate=1e30))


def test_train_command_prints_json_and_one_line_errors(
    tmp_path: Path, student: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from teachercache.cli import main

    arguments = ["train", "--cache", str(cache), "--student", str(student), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--batch-size", "6", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4
    assert main([*arguments, "--batch-size", "0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "batch_size is 0" in error
    assert main(["train", "--cache", str(tmp_path), "--student", "x", "--output", str(tmp_path)]) != 0
    assert capsys.readouterr().err.count("\n") == 1
