"""Prompts in, the teacher's own answers and their rows out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_engine import Bench, FakeEngine, newest
from tiny_server import MAX_LENGTH, TinyServer, problem, tiny_teacher, write_examples

from teachercache.format_spec import Code, Example, Generation, Shard
from teachercache.service.engines import Engine, load_engine
from teachercache.service.engines.stop_ids import stop_ids
from teachercache.service.errors import SequenceError
from teachercache.service.generate import completion_seed
from teachercache.service.plan import count, make_plan
from teachercache.service.store import LocalStore
from teachercache.service.teachers import Limits

__all__ = ["tiny_teacher"]

PROMPTS = [np.array([5, 6, 7]), np.array([8]), np.array([5, 6, 7])]


@pytest.fixture(scope="module")
def engine(tiny_teacher: Path) -> Engine:
    return load_engine("transformers", tiny_teacher)


def completions(engine: Engine, settings: Generation, seeds: list[int]) -> list[list[int]]:
    found = dict(engine.generate(PROMPTS, settings, seeds))
    return [found[index].tolist() for index in range(len(PROMPTS))]


def test_greedy_completions_are_the_most_probable_tokens(engine: Engine) -> None:
    said = completions(engine, Generation(6, 0), [1, 2, 3])
    assert said[0] == said[2] and len(said[0]) <= 6
    for prompt, completion in zip(PROMPTS, said, strict=True):
        ids = np.concatenate([prompt, completion])
        ((_, rows),) = engine.score([ids], k=1, tail_samples=0, seed=0)
        assert rows.token_ids_PK[len(prompt) - 1 :, 0].tolist() == completion


def test_what_is_drawn_depends_on_the_seed_alone(engine: Engine) -> None:
    import torch

    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = completions(engine, Generation(12), [1, 2, 3])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert completions(engine, Generation(12), [1, 2, 3]) == first
    assert first[0] != first[2], "the same prompt with another seed"
    assert completions(engine, Generation(12), [3, 2, 1])[0] == first[2]


def test_draws_follow_the_teachers_distribution(engine: Engine) -> None:
    """First tokens of many completions, against the row of the prompt: chi-square over the most probable ones."""
    draws = 400
    found = dict(engine.generate([PROMPTS[1]] * draws, Generation(1), list(range(draws))))
    ((_, row),) = engine.score([np.array([8, 0])], k=300, tail_samples=0, seed=0)
    order, expected = row.token_ids_PK[0], np.exp(row.logprobs_PK[0].astype(float)) * draws
    groups = np.minimum(np.cumsum(expected) // (draws / 8), 7).astype(int)
    place = {int(token): group for token, group in zip(order, groups, strict=True)}
    seen = np.bincount([place[int(ids[0])] for ids in found.values()], minlength=8)
    wanted = np.bincount(groups, expected, 8)
    # 24.3 is the 0.999 quantile with 7 degrees of freedom
    assert ((seen - wanted) ** 2 / wanted).sum() < 24.3
    nucleus = dict(engine.generate([PROMPTS[1]] * 50, Generation(1, 1, 0.02), list(range(50))))
    kept = set(order[: int(np.searchsorted(np.cumsum(expected), 0.02 * draws)) + 1].tolist())
    assert {int(ids[0]) for ids in nucleus.values()} <= kept


def test_a_completion_ends_where_the_teacher_or_its_length_does(tiny_teacher: Path, tmp_path: Path) -> None:
    import json
    import shutil

    copy = tmp_path / "teacher"
    shutil.copytree(tiny_teacher, copy)
    engine = load_engine("transformers", copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": None, "top_k": 1}))
    free = completions(engine, Generation(100), [4, 5, 6])
    assert [len(ids) for ids in free] == [MAX_LENGTH - len(prompt) for prompt in PROMPTS]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[0][3], 299]}))
    assert stop_ids(copy) == sorted({free[0][3], 299})
    ended = completions(engine, Generation(100), [4, 5, 6])
    assert ended[0] == free[0][: free[0].index(free[0][3]) + 1]


def test_prompts_take_the_room_that_their_completions_may_need(tmp_path: Path) -> None:
    limits = Limits(tmp_path, 300, 20)
    examples = [Example(input_ids=np.arange(length)) for length in (1, 15, 19)]
    path = write_examples(tmp_path / "prompts.parquet", examples)
    assert count(path, limits, Generation(10)) == (3, 11 + 20 + 20)
    plan = make_plan(path, limits, 31, LocalStore(tmp_path), generate=Generation(10))
    assert [(part.sequences, part.positions) for part in plan.ranges] == [(2, 31), (1, 20)]
    for length, code in ((0, Code.SEQUENCE_TOO_SHORT), (20, Code.SEQUENCE_TOO_LONG)):
        path = write_examples(tmp_path / "x.parquet", [Example(input_ids=np.arange(length))])
        with pytest.raises(SequenceError, match="sequence 0 is") as caught:
            count(path, limits, Generation(10))
        assert caught.value.code is code
    path = write_examples(tmp_path / "x.parquet", [Example(input_ids=np.array([300]))])
    with pytest.raises(SequenceError, match="outside"):
        count(path, limits, Generation(10))


def test_positions_are_those_that_came_of_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.spec = bench.request_for(bench.data, shard_positions=32, generate={"max_tokens": 6})
    bench.submit()
    worker = bench.worker(FakeEngine())
    assert worker.step()
    assert bench.row().positions == 6 * 14
    while worker.step():
        pass
    row, manifest = bench.row(), newest(bench)
    lengths = [8 + 1 + completion_seed(0, number) % 6 for number in range(6)]
    assert row.state == "complete" and row.positions == row.positions_done == sum(lengths)
    assert [shard.positions for shard in manifest.shards] == [sum(lengths[i : i + 2]) for i in (0, 2, 4)]
    for descriptor in manifest.shards:
        with Shard.open(bench.store.checked_path(descriptor.digest)) as shard:
            for number, sequence in enumerate(shard, descriptor.first):
                said = sequence.input_ids_L[8:]
                assert set(said.tolist()) == {completion_seed(0, number) % 50}
                assert sequence.loss_mask_L.tolist() == [False] * 8 + [True] * len(said)


@pytest.fixture(scope="module")
def server(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    with TinyServer(tmp_path_factory.mktemp("server") / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        yield server


def test_a_cache_of_the_teachers_own_answers(server: TinyServer, tmp_path: Path, tiny_teacher: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_teacher)
    chats = [[{"role": "user", "content": text}] for text in ("hello", "you", "hello")]
    data = server.upload(write_examples(tmp_path / "x.parquet", [Example(messages=chat) for chat in chats]))
    asked = {"k": 4, "tail_samples": 2, "generate": {"max_tokens": 12}}
    sized = server.http.post("/v1/requests?dry_run=true", json={"teacher": "tiny", "data": data, **asked}).json()
    view = server.complete(data, **asked)
    manifest = server.manifest(view["id"])
    assert manifest.request.generate == Generation(12)
    assert sized["positions"] >= view["positions_total"] == sum(shard.positions for shard in manifest.shards)
    sequences = list(server.sequences(manifest))
    answers = []
    for chat, sequence in zip(chats, sequences, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert sequence.input_ids_L[: len(prompt)].tolist() == prompt
        assert sequence.loss_mask_L.tolist() == [False] * len(prompt) + [True] * (len(sequence) - len(prompt))
        answers.append(sequence.input_ids_L[len(prompt) :].tolist())
    assert answers[0] != answers[2] and all(answers)
    # what is stored is what the teacher says of it
    engine = load_engine("transformers", tiny_teacher)
    direct = dict(engine.score([item.input_ids_L for item in sequences], k=4, tail_samples=2, seed=0))
    for index, sequence in enumerate(sequences):
        np.testing.assert_array_equal(sequence.rows.token_ids_PK, direct[index].token_ids_PK)
    colder = server.complete(data, **(asked | {"generate": {"max_tokens": 12, "temperature": "0"}}))
    assert colder["id"] != view["id"]


def test_what_cannot_be_generated_is_refused(server: TinyServer, tmp_path: Path) -> None:
    data = server.upload(write_examples(tmp_path / "x.parquet", [Example(input_ids=np.arange(MAX_LENGTH))]))
    answer = server.submit(data, generate={"max_tokens": 0})
    assert answer.status_code == 422 and "max_tokens must be an integer from 1" in problem(answer)["detail"]
    failed = server.wait(server.submit(data, generate={"max_tokens": 5}).json()["id"])
    assert failed["error"]["code"] == "sequence_too_long" and "leaves none" in failed["error"]["detail"]
