"""Rows out of a real vLLM are those of the transformers engine; what vLLM does on bad days is told, not hidden."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_server import children, runs, wait_for

from teachercache.format_spec import Example, Generation, Rows
from teachercache.service.engines import (
    Engine,
    EngineDied,
    EngineError,
    InvalidSetting,
    UnscorableSequence,
    load_engine,
)
from teachercache.service.engines.sequences import Ids

pytestmark = pytest.mark.vllm

# prompts of more than a step are prefilled in chunks
ARGS = {"max_num_batched_tokens": 128, "max_model_len": 384}
ASKED = {"k": 16, "tail_samples": 16, "seed": 7}


@pytest.fixture(scope="module")
def engine(teacher_dir: Path) -> Iterator[Any]:
    """The small real teacher in vLLM."""
    engine = load_engine("vllm", teacher_dir, engine_args=ARGS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(teacher_dir: Path) -> Engine:
    """The same teacher in transformers."""
    return load_engine("transformers", teacher_dir)


@pytest.fixture(scope="module")
def sequences(teacher_dir: Path) -> list[Ids]:
    """Real text of all lengths, the least and the most that the engine takes among them."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "".join(topics[name] for name in sorted(topics)[:12])
    ids = np.array(Tokenizer.from_file(str(teacher_dir / "tokenizer.json")).encode(text).ids, np.int32)
    lengths = [2, 3, 17, 127, 128, 129, 130, 257, ARGS["max_model_len"], 350]
    begins = np.cumsum([0, *lengths])
    return [ids[begin : begin + length] for begin, length in zip(begins, lengths, strict=False)]


@pytest.fixture(scope="module")
def pairs(engine: Engine, reference: Engine, sequences: list[Ids]) -> list[tuple[Rows, Rows]]:
    """Each sequence's rows by both engines."""
    ours, theirs = (dict(each.score(sequences, **ASKED)) for each in (engine, reference))
    return [(ours[index], theirs[index]) for index in range(len(sequences))]


def assert_close(ours: Rows, theirs: Rows, tolerance: float = 1e-3) -> None:
    """The same but for float32 sums in another order; ids too, but for near ties."""
    np.testing.assert_allclose(ours.logprobs_PK, theirs.logprobs_PK, atol=tolerance)
    differ_PK = ours.token_ids_PK != theirs.token_ids_PK
    assert differ_PK.mean() < 2e-3
    for row, place in zip(*np.nonzero(differ_PK), strict=True):
        others = np.delete(theirs.logprobs_PK[row], place)
        near = abs(others - theirs.logprobs_PK[row, place]).min() if place < 15 else 0.0
        assert near < tolerance, f"row {row} has another id at {place}, and no tie there"


def test_rows_are_those_of_transformers(pairs: list[tuple[Rows, Rows]], sequences: list[Ids]) -> None:
    for (ours, theirs), ids in zip(pairs, sequences, strict=True):
        assert len(ours) == len(ids) - 1
        assert_close(ours, theirs)
        for name in ("log_tail_mass_P", "logsumexp_P", "entropy_P"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-3, err_msg=name)


def test_draws_are_those_of_transformers_but_for_rounding(pairs: list[tuple[Rows, Rows]]) -> None:
    ours, theirs = (np.concatenate([pair[side].tail_token_ids_PN for pair in pairs]) for side in (0, 1))
    assert (ours == theirs).mean() >= 0.9
    assert not any((pair[0].tail_token_ids_PN[:, :, None] == pair[0].token_ids_PK[:, None, :]).any() for pair in pairs)


def test_draws_follow_the_tail(engine: Engine, reference: Engine, sequences: list[Ids]) -> None:
    """Each row with a deep support tells the tail of the same row with a shallow one: chi-square of pooled draws."""
    ids = sequences[-1]
    ((_, deep),) = reference.score([ids], k=256, tail_samples=0, seed=0)
    ((_, shallow),) = engine.score([ids], k=16, tail_samples=16, seed=11)
    expected, seen, draws = np.zeros(8), np.zeros(8), shallow.tail_token_ids_PN
    assert draws is not None
    for row in range(len(deep)):
        share = np.exp(deep.logprobs_PK[row, 16:].astype(float) - shallow.log_tail_mass_P[row])
        # eight groups of the tail's 240 largest entries, by rank
        groups = np.repeat(np.arange(8), 30)
        expected += np.bincount(groups, share, 8) * 16
        place = {int(token): group for token, group in zip(deep.token_ids_PK[row, 16:], groups, strict=True)}
        for token in draws[row]:
            if int(token) in place:
                seen[place[int(token)]] += 1
    # 20.1 is the 0.99 quantile with 8 degrees of freedom; systematic draws vary less than independent ones
    assert expected.min() > 20
    assert ((seen - expected) ** 2 / expected).sum() < 20.1


def test_the_order_and_the_company_change_little(engine: Engine, sequences: list[Ids]) -> None:
    together = dict(engine.score(sequences, **ASKED))
    for index in (1, 6):
        ((_, alone),) = engine.score([sequences[index]], **ASKED)
        assert_close(alone, together[index], 2e-4)
    assert [index for index, _ in engine.score(sequences[:4], **ASKED)] == [0, 1, 2, 3]


def test_improbable_entries_go_to_the_tail(engine: Engine, reference: Engine, sequences: list[Ids]) -> None:
    (ours,), (theirs,) = (
        dict(each.score([sequences[3]], k=32, tail_samples=4, seed=1, min_prob=0.01)).values()
        for each in (engine, reference)
    )
    assert (ours.token_ids_PK < 0).any()
    kept_PK = (ours.token_ids_PK >= 0) & (theirs.token_ids_PK >= 0)
    assert ((ours.token_ids_PK < 0) == (theirs.token_ids_PK < 0)).mean() > 0.999
    np.testing.assert_allclose(ours.logprobs_PK[kept_PK], theirs.logprobs_PK[kept_PK], atol=1e-3)


def test_taking_no_more_ends_what_is_under_way(engine: Any, sequences: list[Ids]) -> None:
    scoring = engine.score(sequences * 3, **ASKED)
    next(scoring)
    assert engine._llm.output_processor.get_num_unfinished_requests() > 0
    scoring.close()
    wait_for(lambda: engine._llm.output_processor.get_num_unfinished_requests() == 0 or None)
    assert len(dict(engine.score(sequences[:3], **ASKED))) == 3


def test_vllm_gets_no_more_than_it_works_on_soon(engine: Any, sequences: list[Ids]) -> None:
    from teachercache.service.engines.vllm.engine import STEPS_IN_FLIGHT

    scoring = engine.score([sequences[3]] * 40, **ASKED)
    next(scoring)
    waiting = engine._llm.output_processor.get_num_unfinished_requests()
    assert waiting * len(sequences[3]) <= STEPS_IN_FLIGHT * ARGS["max_num_batched_tokens"]
    scoring.close()


def test_the_public_api_gives_the_same(engine: Any, sequences: list[Ids]) -> None:
    from teachercache.service.engines.vllm.front import FlatPath

    few = [*sequences[:4], sequences[8]]
    own, engine._path = engine._path, FlatPath()
    try:
        flat = dict(engine.score(few, k=16, tail_samples=0, seed=0))
        with pytest.raises(InvalidSetting, match="without our hook"):
            engine.score(sequences, **ASKED)
        assert "path=flat" in engine.fingerprint("sha256:" + "0" * 64, "sha256:" + "0" * 64).kernel
    finally:
        engine._path = own
    hook = dict(engine.score(few, k=16, tail_samples=0, seed=0))
    for index in hook:
        assert_close(flat[index], hook[index], 2e-4)
        masses = (np.exp(rows[index].log_tail_mass_P) for rows in (flat, hook))
        np.testing.assert_allclose(*masses, atol=1e-4)


def test_a_hook_that_fails_fails_the_request_and_not_vllm(engine: Any, sequences: list[Ids]) -> None:
    from teachercache.service.engines.vllm.front import Wanted

    # more draws than fit into memory
    impossible = Wanted(16, 2**40, 7, 0.0)
    with pytest.raises(EngineError, match="failed in vLLM's worker"):
        engine._run(engine._one(engine._path, sequences[2], impossible))
    assert len(dict(engine.score(sequences[:3], **ASKED))) == 3


def test_completions_are_those_of_transformers(engine: Engine, reference: Engine, sequences: list[Ids]) -> None:
    """Greedy ones but for ties; of drawn ones, those of one prompt differ."""
    prompts = [ids[:length] for ids in sequences[5:] for length in (4, 40)]
    ours, theirs = (dict(each.generate(prompts, Generation(8, 0), [0] * len(prompts))) for each in (engine, reference))
    assert list(ours) == list(range(len(prompts)))
    same = [ours[index].tolist() == theirs[index].tolist() for index in ours]
    assert sum(same) >= len(same) - 1
    drawn = dict(engine.generate([prompts[0]] * 6, Generation(8), list(range(6))))
    assert len({tuple(ids.tolist()) for ids in drawn.values()}) > 1
    # the longest has room for what vLLM's context leaves
    longest = sequences[8][:-1]
    ((_, said),) = engine.generate([longest], Generation(50), [1])
    assert len(said) == 1


def test_a_completion_ends_with_the_teachers_end_token(engine: Engine, teacher_dir: Path) -> None:
    from teachercache.service.engines.stop_ids import stop_ids
    from teachercache.service.engines.tokenizer import Tokenizer

    chat = [{"role": "user", "content": "Say only the word yes."}]
    prompt = Tokenizer(teacher_dir).encode(Example(messages=chat), as_prompt=True).input_ids
    assert prompt is not None
    ((_, said),) = engine.generate([prompt], Generation(200, 0), [0])
    assert len(said) < 200 and int(said[-1]) in stop_ids(teacher_dir)


def test_what_cannot_be_scored_is_refused_before(engine: Engine, sequences: list[Ids]) -> None:
    long = np.zeros(ARGS["max_model_len"] + 1, np.int32)
    for wrong in (sequences[0][:1], long, np.array([0, engine.vocab_size])):
        with pytest.raises(UnscorableSequence):
            engine.score([sequences[0], wrong], **ASKED)
    for setting in ({"k": 0}, {"k": engine.vocab_size + 1}, {"tail_samples": -1}, {"min_prob": 2.0}):
        with pytest.raises(InvalidSetting):
            engine.score(sequences, **(ASKED | setting))


def test_who_produces_the_numbers(engine: Engine) -> None:
    zeros = "sha256:" + "0" * 64
    found = engine.fingerprint(zeros, zeros)
    assert (found.engine, found.dtype, found.head_dtype, found.device) == ("vllm", "float32", "float32", "cpu")
    assert {"vllm", "torch"} <= set(found.software)
    assert "path=hook" in found.kernel and "max_model_len=384" in found.kernel


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"head_dtype": "float16"}, {"capture_path": "other"}])
def test_unknown_settings_are_refused(teacher_dir: Path, settings: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting):
        load_engine("vllm", teacher_dir, **settings)


def test_a_setting_that_vllm_does_not_know_leaves_nothing_behind(teacher_dir: Path) -> None:
    before = children(os.getpid())
    with pytest.raises(InvalidSetting, match="no_such_setting"):
        load_engine("vllm", teacher_dir, engine_args={"no_such_setting": 1})
    assert children(os.getpid()) == before


LOAD = """
import sys, time
from teachercache.service.engines import load_engine
if __name__ == "__main__":
    engine = load_engine("vllm", sys.argv[1], engine_args={"max_model_len": 256})
    print("ready", flush=True)
    time.sleep(600)
"""


def test_vllm_ends_with_the_process_that_started_it(teacher_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    owner = subprocess.Popen([sys.executable, str(script), str(teacher_dir)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert "ready\n" in iter(owner.stdout.readline, "")
    started = children(owner.pid)
    started += [grandchild for child in started for grandchild in children(child)]
    assert len(started) >= 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: None if any(runs(pid) for pid in started) else True)


def test_experts_spread_over_two_ranks(tmp_path: Path) -> None:
    """Tensor parallelism and a mixture of experts, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1003,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        head_dim=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    random = np.random.default_rng(0)
    few = [random.integers(0, 1003, length).astype(np.int32) for length in (2, 50, 65, 150)]
    args = {"max_model_len": 200, "max_num_batched_tokens": 64, "tensor_parallel_size": 2}
    engine = load_engine("vllm", tmp_path, capture_path="hook", engine_args=args)
    try:
        ours = dict(engine.score(few, **ASKED))
    finally:
        engine.close()
    theirs = dict(load_engine("transformers", tmp_path).score(few, **ASKED))
    for index in range(len(few)):
        assert_close(ours[index], theirs[index], 1e-4)
        assert (ours[index].tail_token_ids_PN == theirs[index].tail_token_ids_PN).mean() > 0.99


def test_memory_that_is_not_there_may_be_there_later(teacher_dir: Path) -> None:
    """What is refused for good is a teacher; a start that fails is tried again."""
    with pytest.raises(EngineDied, match="did not start"):
        load_engine("vllm", teacher_dir, engine_args={"num_gpu_blocks_override": 1, "max_model_len": 8192})


def test_an_engine_that_hangs_is_told_before_work_is_sent(
    engine: Any, sequences: list[Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    from teachercache.service.engines.vllm import engine as module

    monkeypatch.setattr(module, "CANARY_SECONDS", 3.0)
    family = [pid for child in children(os.getpid()) for pid in (child, *children(child))]
    cores = [pid for pid in family if "VLLM" in _command(pid) + Path(f"/proc/{pid}/comm").read_text()]
    assert cores
    for pid in cores:
        os.kill(pid, signal.SIGSTOP)
    try:
        engine._answered = 0.0
        with pytest.raises(EngineDied, match="gave nothing for 3 s"):
            next(engine.score(sequences[:1], **ASKED))
    finally:
        for pid in cores:
            os.kill(pid, signal.SIGCONT)
    assert len(dict(engine.score(sequences[:1], **ASKED))) == 1


def test_a_killed_engine_is_told_and_another_goes_on(teacher_dir: Path, sequences: list[Ids]) -> None:
    engine: Any = load_engine("vllm", teacher_dir, engine_args=ARGS)
    scoring = engine.score(sequences, **ASKED)
    next(scoring)
    started = children(os.getpid())
    cores = [pid for pid in started if "EngineCore" in Path(f"/proc/{pid}/comm").read_text() + _command(pid)]
    assert cores
    # the module's own engine runs too: this one's is the last that was started
    os.kill(max(cores), signal.SIGKILL)
    with pytest.raises(EngineDied):
        list(scoring)
    with pytest.raises(EngineDied):
        list(engine.score(sequences[:1], **ASKED))
    engine.close()
    engine.close()


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
