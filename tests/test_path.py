"""The whole path on real parts: a real teacher behind real HTTP, its rows streamed, a student trained without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_docs import blocks
from tiny_cache import write_cache

from teachercache.client import Client, stream_topk
from teachercache.client.transport import Transport
from teachercache.demo.evaluate import evaluate
from teachercache.demo.run import DemoConfig, Tokens, tokens_of
from teachercache.demo.server import serve, wait_until_teacher_left
from teachercache.format_spec import Example, Manifest, Shard, content_key, write_dataset
from teachercache.format_spec.shard_set import ShardSet
from teachercache.trainer import Student, TrainConfig, train
from teachercache.trainer.metrics import read_metrics

K, TAIL_SAMPLES = 16, 16


@pytest.fixture(scope="module")
def moved_teacher(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real teacher under a path of its own, so that it can be taken away."""
    folder = tmp_path_factory.mktemp("teacher") / "smollm2"
    folder.mkdir()
    for path in teacher_dir.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def train_ids(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    config = DemoConfig(folder=tmp_path_factory.mktemp("text"), train_tokens=700, heldout_tokens=64, sequence_length=96)
    return tokens_of(teacher_dir, config)[0]


@pytest.fixture(scope="module")
def served(
    moved_teacher: Path, train_ids: Tokens, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """(url, request id) of a complete cache; the teacher's process has left and its folder is gone."""
    folder = tmp_path_factory.mktemp("served")
    write_dataset(folder / "data.parquet", (Example(input_ids=np.array(ids)) for ids in train_ids))
    with serve("smollm2", moved_teacher, folder / "server") as url, Client(url, cache_dir=folder / "cache") as client:
        view = client.submit(teacher="smollm2", data=client.upload(folder / "data.parquet"), shard_positions=200)
        assert client.wait(view.id, timeout_s=300).state == "complete"
        wait_until_teacher_left(url)
        moved_teacher.rename(moved_teacher.with_name("gone"))
        yield url, view.id
        moved_teacher.with_name("gone").rename(moved_teacher)


def test_streamed_rows_are_those_of_a_direct_forward_pass(
    served: tuple[str, str], train_ids: Tokens, teacher_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.float32).eval()
    url, request = served
    with stream_topk(url, request, batch_size=1, shuffle=False, cache_dir=tmp_path) as stream:
        assert len(stream.manifest.shards) >= 3
        assert (stream.manifest.request.k, stream.manifest.request.tail_samples) == (K, TAIL_SAMPLES)
        batches = list(stream)
    assert [batch.input_ids_BT[0].tolist() for batch in batches] == train_ids
    drawn = expected = 0
    for batch in batches:
        with torch.no_grad():
            logits = teacher(torch.from_numpy(batch.input_ids_BT)).logits[0, :-1].double()
        truth = logits.log_softmax(-1)
        ids = torch.from_numpy(batch.token_ids_BPK[0].astype(np.int64))
        # ids exactly, but for ties: what stands at each place is as probable as what should
        best = truth.topk(K, dim=-1)
        assert (best.indices == ids).float().mean() > 0.995
        torch.testing.assert_close(truth.gather(1, ids), best.values, rtol=0, atol=1e-3)
        stored = torch.from_numpy(batch.logprobs_BPK[0]).double()
        torch.testing.assert_close(stored, truth.gather(1, ids), rtol=2.0**-8, atol=2e-4)
        tail = truth.scatter(1, ids, -torch.inf)
        log_tail = torch.from_numpy(batch.log_tail_mass_BP[0]).double()
        torch.testing.assert_close(log_tail, tail.logsumexp(-1), rtol=0, atol=1e-3)
        entropy = -(truth.exp() * truth).sum(-1)
        torch.testing.assert_close(torch.from_numpy(batch.entropy_BP[0]).double(), entropy, rtol=0, atol=1e-3)
        lse = torch.from_numpy(batch.logsumexp_BP[0]).double()
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-3)
        samples = torch.from_numpy(batch.tail_token_ids_BPN[0].astype(np.int64))
        assert not (samples[:, :, None] == ids[:, None, :]).any()
        # unbiased draws: the mean of any figure over them is near its mean over the tail
        weights = (tail - tail.logsumexp(-1, keepdim=True)).exp()
        drawn += float(tail.gather(1, samples).mean(1).sum())
        expected += float((weights * tail.masked_fill(weights == 0, 0.0)).sum(-1).sum())
    assert drawn == pytest.approx(expected, rel=0.01)


def test_training_needs_neither_the_teacher_nor_its_folder(
    served: tuple[str, str], teacher_dir: Path, moved_teacher: Path, tmp_path: Path
) -> None:
    assert not moved_teacher.exists()
    student = tmp_path / "student"
    Student.load(str(teacher_dir), device="cpu", keep_layers=[0, 29]).save(student)
    url, request = served
    environment = os.environ | {"TEACHERCACHE_CACHE_DIR": str(tmp_path / "cache"), "TEACHERCACHE_URL": url}
    command = [sys.executable, "-m", "teachercache", "train", "--cache", request, "--student", str(student)]
    command += ["--output", str(tmp_path / "run"), "--batch-size", "2", "--epochs", "3", "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    losses = [point.loss for point in read_metrics(Path(json.loads(done.stdout)["metrics"]))]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_the_same_request_again_runs_nothing(served: tuple[str, str], train_ids: Tokens, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data.parquet", (Example(input_ids=np.array(ids)) for ids in train_ids))
    with Client(served[0], cache_dir=tmp_path / "cache") as client:
        before = client.status(served[1])
        view = client.submit(teacher="smollm2", data=client.upload(tmp_path / "data.parquet"), shard_positions=200)
        assert (view.id, view.created, view.state) == (served[1], False, "complete")
        assert view.teacher_tokens_scored == before.teacher_tokens_scored == sum(map(len, train_ids))


def test_pulled_shards_are_a_cache_without_a_server(served: tuple[str, str], tmp_path: Path) -> None:
    with Client(served[0], cache_dir=tmp_path / "cache") as client:
        client.pull(served[1], tmp_path / "pulled")
    for path in (tmp_path / "pulled" / "shards").iterdir():
        with Shard.open(path) as shard:
            shard.verify()
    streams = [
        stream_topk(tmp_path / "pulled", batch_size=3, seed=5),
        stream_topk(served[0], served[1], batch_size=3, seed=5, cache_dir=tmp_path / "cache"),
    ]
    for ours, theirs in zip(*streams, strict=True):
        for field in fields(ours):
            np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))
    for stream in streams:
        stream.close()


def test_the_loop_in_the_readme_trains(
    served: tuple[str, str], teacher_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks("python")
    url, cache_id = served
    monkeypatch.setenv("TEACHERCACHE_CACHE_DIR", str(tmp_path / "cache"))
    student = Student.load(str(teacher_dir), device="cpu", keep_layers=[0]).model
    names: dict[str, Any] = {"cache_id": cache_id, "student": student}
    exec(code.replace("http://127.0.0.1:8765", url).replace('"cuda"', '"cpu"'), names)
    assert torch.isfinite(names["loss"])
    assert student.lm_head.weight.grad.abs().sum() > 0


def test_one_sequence_costs_two_ranged_reads(
    served: tuple[str, str], train_ids: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    opened = Transport.open

    def counted(self: Transport, method: str, path: str, **options: Any) -> Any:
        asked.append(path)
        return opened(self, method, path, **options)

    with Client(served[0], cache_dir=tmp_path / "cache") as client, client.sequences(served[1]) as sequences:
        client.pull(served[1], tmp_path / "pulled")
        monkeypatch.setattr(Transport, "open", counted)
        last = sequences.read(len(sequences) - 1)
        assert len(asked) == 2 and len(set(asked)) == 1 and "/v1/blobs/sha256:" in f"/{asked[0]}"
        (number,) = sequences.find(content_key(train_ids[-1]))
        assert number == len(train_ids) - 1
        assert list((tmp_path / "cache").glob("blobs/**/*")) == []
    assert last.input_ids_L.tolist() == train_ids[-1]
    stored = ShardSet(tmp_path / "pulled").sequence(number)
    for field in fields(last.rows):
        np.testing.assert_array_equal(getattr(last.rows, field.name), getattr(stored.rows, field.name))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_learns_from_the_rows_and_from_nothing_else(tmp_path: Path, teacher_dir: Path) -> None:
    """A run of `teachercache demo --json`, and a student that is fed the rows of the neighbouring position."""
    sizes = ["--train-tokens", "8192", "--heldout-tokens", "1024", "--epochs", "1", "--folder", str(tmp_path)]
    found = _demo([*sizes, "--json"])
    assert found["teacher_tokens_scored"] == found["cache_tokens"] > 7000
    assert found["heldout_kl_after"] < found["heldout_kl_labels_only"] < found["heldout_kl_before"]
    assert found["ppl_after"] < found["ppl_before"]
    assert found["shards"] >= 4
    assert found["bytes_per_token"] < 100
    assert found["loss_peak_mb"] < found["dense_loss_peak_mb"]
    assert min(found["capture_tok_s"], found["train_tok_s"]) > 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

    pulled = next((tmp_path / "pulled").iterdir())
    config = DemoConfig(folder=tmp_path, train_tokens=8192, heldout_tokens=1024, epochs=1)
    settings = TrainConfig(
        student=str(tmp_path / "students" / "untrained"),
        cache=str(shifted(pulled, tmp_path / "shifted")),
        output=tmp_path / "from-shifted",
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        device="cpu",
    )
    heldout = tokens_of(teacher_dir, config)[1]
    (score,) = evaluate(teacher_dir, [train(settings).student], heldout, lambda done, total: None)
    assert found["heldout_kl_after"] < score.kl


def _demo(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "teachercache", "demo", *arguments]
    # it trains a real model, for which tests that share the machine with others have too few threads
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shifted(pulled: Path, folder: Path) -> Path:
    """The same cache with every row one position late."""
    manifest = Manifest.from_bytes((pulled / "manifest.json").read_bytes())
    sequences = []
    for descriptor in manifest.shards:
        for item in Shard.open(pulled / "shards" / f"{descriptor.digest.removeprefix('sha256:')}.tkc"):
            columns = {name: np.roll(getattr(item.rows, name), 1, axis=0) for name in item.rows.__dataclass_fields__}
            sequences.append(replace(item, rows=replace(item.rows, **columns)))
    return write_cache(folder, sequences, maker=manifest.fingerprint)
