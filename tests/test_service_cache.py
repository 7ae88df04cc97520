"""A cache from end to end: real server, real worker, real engine, tiny teacher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_server import TinyServer, problem, random_examples, tiny_teacher, wait_for, write_examples

from teachercache.format_spec import Example, Manifest, Shard

__all__ = ["tiny_teacher"]


@pytest.fixture(scope="module")
def server(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """A server whose worker frees its memory soon."""
    data_dir = tmp_path_factory.mktemp("cache") / "data"
    with TinyServer(data_dir, "--teacher", f"tiny={tiny_teacher}", "--idle-seconds", "20") as server:
        yield server


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Sequences, half of them with a loss mask."""
    masked = [
        Example(input_ids=e.input_ids, loss_mask=np.arange(len(e.input_ids)) % 3 > 0)
        for e in random_examples(30, seed=5)
    ]
    return [*masked, *random_examples(30, seed=6)]


@pytest.fixture(scope="module")
def data(server: TinyServer, examples: list[Example], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the uploaded examples."""
    return server.upload(write_examples(tmp_path_factory.mktemp("data") / "x.parquet", examples))


def test_shards_hold_what_the_engine_says(
    server: TinyServer, tiny_teacher: Path, data: str, examples: list[Example]
) -> None:
    from teachercache.service.engines import load_engine

    view = server.complete(data, k=8, tail_samples=4, seed=7, shard_positions=300)
    manifest = server.manifest(view["id"])
    assert manifest.complete and manifest.digest == view["manifest"] and manifest.request.id == view["id"]
    assert len(manifest.shards) == view["shards_total"] > 3
    assert all(shard.positions <= 300 for shard in manifest.shards)
    (teacher,) = server.http.get("/v1/teachers").json()["items"]
    assert manifest.fingerprint.teacher == teacher["digest"] == view["request"]["teacher"]
    assert manifest.fingerprint.tokenizer == teacher["tokenizer"]
    engine = load_engine("transformers", tiny_teacher)
    direct = dict(engine.score([e.input_ids for e in examples], k=8, tail_samples=4, seed=7))
    stored = list(server.sequences(manifest))
    assert len(stored) == len(examples) and manifest.quality.rows == sum(len(rows) for rows in direct.values())
    same_support, same_draws = [], []
    for index, (sequence, example) in enumerate(zip(stored, examples, strict=True)):
        assert (sequence.input_ids_L == example.input_ids).all()
        mask = np.ones(len(sequence), dtype=bool) if example.loss_mask is None else example.loss_mask
        assert (sequence.loss_mask_L == mask).all()
        rows, expected = sequence.rows, direct[index]
        # batches differ from those of the direct call, and values are on the bf16 grid
        np.testing.assert_allclose(rows.logprobs_PK, expected.logprobs_PK, rtol=2**-8, atol=1e-4)
        np.testing.assert_allclose(rows.log_tail_mass_P, expected.log_tail_mass_P, atol=1e-4)
        np.testing.assert_allclose(rows.entropy_P, expected.entropy_P, atol=1e-4)
        np.testing.assert_allclose(rows.logsumexp_P, expected.logsumexp_P, atol=1e-4)
        same_support.append((np.sort(rows.token_ids_PK) == np.sort(expected.token_ids_PK)).all(axis=1))
        same_draws.append((rows.tail_token_ids_PN == expected.tail_token_ids_PN).all(axis=1))
    assert np.concatenate(same_support).mean() > 0.98
    assert np.concatenate(same_draws).mean() > 0.9


def test_a_least_probability_cuts_supports_before_their_tails_are_drawn(
    server: TinyServer, tiny_teacher: Path, data: str, examples: list[Example]
) -> None:
    from teachercache.service.engines import load_engine

    settings: dict[str, Any] = {"k": 16, "tail_samples": 4, "seed": 7, "shard_positions": 300}
    view = server.complete(data, min_prob="0.00450", **settings)
    assert view["request"]["min_prob"] == "0.0045"
    assert server.submit(data, min_prob=0.0045, **settings).json()["id"] == view["id"]
    assert server.submit(data, min_prob=4.5, **settings).status_code == 422
    manifest = server.manifest(view["id"])
    assert manifest.request.id == view["id"] and manifest.request.min_prob == "0.0045"
    for descriptor in manifest.shards:
        Shard(server.http.get(f"/v1/blobs/{descriptor.digest}").content).verify()
    engine = load_engine("transformers", tiny_teacher)
    direct = dict(engine.score([e.input_ids for e in examples], k=16, tail_samples=4, seed=7, min_prob=0.0045))
    same_support, same_draws, kept = [], [], []
    for index, sequence in enumerate(server.sequences(manifest)):
        rows, expected = sequence.rows, direct[index]
        same = (np.sort(rows.token_ids_PK) == np.sort(expected.token_ids_PK)).all(axis=1)
        np.testing.assert_allclose(rows.log_tail_mass_P[same], expected.log_tail_mass_P[same], atol=1e-4)
        same_support.append(same)
        same_draws.append((rows.tail_token_ids_PN == expected.tail_token_ids_PN).all(axis=1))
        kept.append((rows.token_ids_PK >= 0).sum(axis=1))
        assert (rows.logprobs_PK[:, 1][kept[-1] > 1] >= np.log(0.0045) * (1 + 2**-8)).all()
    assert np.concatenate(same_support).mean() > 0.98
    assert np.concatenate(same_draws).mean() > 0.9
    assert np.concatenate(kept).min() < np.concatenate(kept).max() <= 16


def test_every_shard_verifies(server: TinyServer, data: str) -> None:
    view = server.complete(data, k=8, tail_samples=4, seed=7, shard_positions=300)
    for descriptor in server.manifest(view["id"]).shards:
        shard = Shard(server.http.get(f"/v1/blobs/{descriptor.digest}").content)
        shard.verify()
        assert (shard.num_sequences, shard.num_positions) == (descriptor.sequences, descriptor.positions)
        assert (shard.metadata.k, shard.metadata.tail_samples, shard.metadata.profile) == (8, 4, "bf16")


def test_the_same_request_twice_is_one_run(server: TinyServer, data: str) -> None:
    first = server.submit(data, k=3)
    assert first.status_code == 202 and first.json()["created"]
    assert first.headers["location"] == f"/v1/requests/{first.json()['id']}"
    view = server.wait(first.json()["id"])
    (teacher,) = server.http.get("/v1/teachers").json()["items"]
    # spelled out, by digest, with defaults written down: it is the same request
    second = server.submit(
        data, teacher=teacher["digest"], k=3, tail_samples=16, engine="transformers", dtype="float32"
    )
    assert second.status_code == 200 and not second.json()["created"] and second.json()["state"] == "complete"
    assert {**second.json(), "created": None} == {**view, "created": None}
    assert view["teacher_tokens_scored"] == view["positions_total"]
    assert server.submit(data, k=4).status_code == 202


def test_many_who_ask_at_once_cause_one_run(server: TinyServer, data: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.submit(data, k=5, seed=1), range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [202]
    (request_id,) = {answer.json()["id"] for answer in answers}
    view = server.wait(request_id)
    assert view["teacher_tokens_scored"] == view["positions_total"]


def test_a_partial_manifest_can_be_read_while_the_teacher_runs(server: TinyServer, data: str) -> None:
    request_id = server.submit(data, k=2, shard_positions=1).json()["id"]
    early = server.http.get(f"/v1/requests/{request_id}/manifest")
    if early.status_code == 404:
        assert problem(early)["code"] == "no_manifest_yet" and problem(early)["retryable"]
    view = server.wait(request_id, lambda view: view["shards_done"] >= 1)
    partial = server.manifest(request_id)
    assert len(partial.shards) >= 1 and partial.sequences == 60
    if view["state"] == "running":
        assert view["shards_total"] == 60 and view["eta_s"] is not None and not partial.complete
    assert len(list(server.sequences(partial))) == len(partial.shards)
    progress = []

    def poll() -> dict[str, Any] | None:
        view = server.get(request_id)
        progress.append((view["positions_done"], view["shards_done"]))
        return view if view["state"] == "complete" else None

    wait_for(poll, server.log_text)
    assert progress == sorted(progress) and len(set(progress)) > 3
    # what was fetched stays what it was
    assert Manifest.from_bytes(server.http.get(f"/v1/manifests/{partial.digest}").content) == partial
    assert server.manifest(request_id).shards[: len(partial.shards)] == partial.shards


def test_a_dry_run_tells_the_size_and_keeps_nothing(server: TinyServer, data: str, examples: list[Example]) -> None:
    body = {"teacher": "tiny", "data": data, "k": 6, "tail_samples": 2}
    positions = sum(len(example.input_ids) for example in examples)
    answer = server.http.post("/v1/requests?dry_run=true", json=body)
    sized = answer.json()
    assert answer.status_code == 200 and not sized["exists"]
    assert (sized["sequences"], sized["positions"]) == (60, positions) and sized["estimated_seconds"] > 0
    assert server.http.get(f"/v1/requests/{sized['id']}").status_code == 404
    view = server.complete(data, k=6, tail_samples=2)
    assert view["id"] == sized["id"]
    written = sum(shard.bytes for shard in server.manifest(view["id"]).shards)
    assert 0.3 * written < sized["estimated_bytes"] < 3 * written
    again = server.http.post("/v1/requests?dry_run=true", json=body).json()
    assert again["exists"] and again["positions"] == positions


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_text_is_tokenised_by_the_teacher(server: TinyServer, tmp_path: Path, tiny_teacher: Path, kind: str) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_teacher)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yo"}]
    example = Example(text="hello you") if kind == "text" else Example(messages=chat)
    view = server.complete(server.upload(write_examples(tmp_path / "x.parquet", [example])), k=2)
    (sequence,) = server.sequences(server.manifest(view["id"]))
    if kind == "text":
        assert tokenizer.decode(sequence.input_ids_L) == "hello you" and sequence.loss_mask_L.all()
        return
    assert tokenizer.decode(sequence.input_ids_L) == "user:hello<end>assistant:yo<end>"
    assert tokenizer.decode(sequence.input_ids_L[sequence.loss_mask_L]) == "assistant:yo<end>"


def test_a_damaged_shard_is_never_served_and_is_made_again(server: TinyServer, data: str) -> None:
    view = server.complete(data, k=7, shard_positions=500)
    manifest = server.manifest(view["id"])
    victim = manifest.shards[1].digest
    path = server.data_dir / "blobs" / "sha256" / victim[7:9] / victim[7:]
    assert server.http.get(f"/v1/blobs/{victim}").status_code == 200
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    answer = server.http.get(f"/v1/blobs/{victim}")
    assert answer.status_code == 500 and problem(answer)["code"] == "corrupt" and victim in problem(answer)["detail"]
    assert server.http.get(f"/v1/blobs/{victim}").status_code == 404
    assert (server.data_dir / "quarantine" / victim[7:]).read_bytes() == content
    failed = server.get(view["id"])
    assert failed["state"] == "failed" and failed["error"]["code"] == "corrupt" and victim in failed["error"]["detail"]
    assert victim not in {shard.digest for shard in server.manifest(view["id"]).shards}
    assert server.http.post(f"/v1/requests/{view['id']}/retry").status_code == 202
    healed = server.wait(view["id"])
    assert healed["state"] == "complete" and healed["manifest"] == view["manifest"]
    assert healed["teacher_tokens_scored"] == view["teacher_tokens_scored"] + manifest.shards[1].positions
    assert len(list(server.sequences(manifest))) == 60


def test_a_lost_shard_is_made_again_when_its_request_is_posted_again(server: TinyServer, data: str) -> None:
    view = server.complete(data, k=7, shard_positions=501)
    victim = server.manifest(view["id"]).shards[0].digest
    (server.data_dir / "blobs" / "sha256" / victim[7:9] / victim[7:]).unlink()
    assert problem(server.http.get(f"/v1/blobs/{victim}"))["code"] == "corrupt"
    answer = server.submit(data, k=7, shard_positions=501)
    assert answer.status_code == 200 and answer.json()["state"] == "queued"
    assert server.wait(view["id"])["manifest"] == view["manifest"]
    assert server.http.get(f"/v1/blobs/{victim}").status_code == 200


def test_an_idle_worker_gives_its_memory_back(tiny_teacher: Path, tmp_path: Path) -> None:
    arguments = ["--teacher", f"tiny={tiny_teacher}", "--idle-seconds", "0.5"]
    with TinyServer(tmp_path / "data", *arguments) as server:
        # a bad data set is found without loading the teacher, so this worker is quick
        bad = write_examples(tmp_path / "x.parquet", [Example(input_ids=np.array([1]))])
        data = server.upload(bad)
        assert server.worker() is None
        assert server.wait(server.submit(data).json()["id"])["state"] == "failed"
        begin = time.monotonic()
        wait_for(lambda: True if server.worker() is None else None, server.log_text)
        assert time.monotonic() - begin < 20
        idle = {"name": "worker", "ok": True, "detail": "idle"}
        wait_for(lambda: True if idle in server.http.get("/readyz").json()["checks"] else None, server.log_text)
        server.http.post(f"/v1/requests/{server.submit(data).json()['id']}/retry")
        assert server.wait(server.submit(data).json()["id"], lambda v: v["state"] == "failed")["error"] is not None
