"""Rows from a vLLM server over HTTP: those of the transformers engine; and what other answers lead to."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import VOCAB_SIZE, write_teacher

from teachercache.service.engines import EngineDied, EngineError, InvalidSetting, UnscorableSequence, load_engine

SEQUENCE = np.array([1, 2, 3], np.int32)
GOOD_ROW = {str(token): {"logprob": -1.0 * (token + 1), "rank": token + 1} for token in range(4)}
Answer = Callable[[httpx.Request], httpx.Response]


def answers(**changed: Any) -> Answer:
    """A server that says what vLLM does, but for what is changed."""
    pages = {
        "/v1/models": {"data": [{"id": "m", "max_model_len": 8}]},
        "/version": {"version": "0.32.0"},
        "/v1/completions": {"choices": [{"prompt_logprobs": [None, GOOD_ROW, GOOD_ROW]}]},
    } | {"/" + path.replace("_", "/"): page for path, page in changed.items()}

    def answer(request: httpx.Request) -> httpx.Response:
        page = pages[request.url.path]
        return page if isinstance(page, httpx.Response) else httpx.Response(200, json=page)

    return answer


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load the engine with a server that answers so."""
    teacher, client = write_teacher(tmp_path / "teacher"), httpx.Client

    def loaded(answer: Answer, **options: Any) -> Any:
        monkeypatch.setattr(httpx, "Client", lambda **how: client(**how, transport=httpx.MockTransport(answer)))
        return load_engine("openai", teacher, dtype="float32", **({"base_url": "http://teacher"} | options))

    return loaded


def test_a_row_is_the_top_k_whatever_else_comes(load: Callable[..., Any]) -> None:
    # the token itself is among the entries, and behind the k first
    entries = GOOD_ROW | {"40": {"logprob": -9.0, "rank": 30}, "3": {"logprob": -9999.0, "rank": 50}}
    engine = load(answers(v1_completions={"choices": [{"prompt_logprobs": [None, entries, entries]}]}))
    ((index, rows),) = engine.score([SEQUENCE], k=3, tail_samples=0, seed=0)
    assert index == 0 and rows.token_ids_PK.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(rows.logprobs_PK, [[-1.0, -2.0, -3.0]] * 2)
    np.testing.assert_allclose(rows.log_tail_mass_P, np.log(1 - np.exp([-1.0, -2.0, -3.0]).sum()), rtol=1e-6)
    assert engine.fingerprint("sha256:" + "0" * 64, "sha256:" + "0" * 64).head_dtype == "unknown"


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"v1_models": {"data": []}}, InvalidSetting),
        ({"v1_models": {"data": [{"id": "a", "max_model_len": 8}, {"id": "b", "max_model_len": 8}]}}, InvalidSetting),
        ({"v1_models": {"data": [{"id": "m"}]}}, InvalidSetting),
        ({"v1_models": {"items": []}}, EngineError),
        ({"v1_models": httpx.Response(401, text="who are you")}, EngineError),
        ({"v1_models": httpx.Response(503, text="loading")}, EngineDied),
    ],
)
def test_a_server_that_is_none_is_refused_at_once(
    load: Callable[..., Any], changed: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        load(answers(**changed))


def positions(*rows: Any) -> dict[str, Any]:
    return {"v1_completions": {"choices": [{"prompt_logprobs": [None, *rows]}]}}


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (positions(GOOD_ROW), EngineError, "each of 3 tokens"),
        (positions(GOOD_ROW, {"1": {"logprob": -0.1}, "3": {"logprob": -1.0}}), EngineError, "2 entries of 4"),
        (positions(GOOD_ROW, {str(9 + i): {"logprob": -1.0 - i} for i in range(5)}), EngineError, "other tokens"),
        ({"v1_completions": {"choices": [{"text": "x"}]}}, EngineError, "is it vLLM"),
        ({"v1_completions": httpx.Response(400, text="logprobs above max")}, EngineError, "--max-logprobs"),
        ({"v1_completions": httpx.Response(500, text="dead")}, EngineDied, "500"),
    ],
)
def test_an_answer_that_is_no_rows_is_told(
    load: Callable[..., Any], changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    engine = load(answers(**changed))
    with pytest.raises(error, match=words):
        list(engine.score([SEQUENCE], k=4, tail_samples=0, seed=0))


def test_a_server_that_is_away_is_told(load: Callable[..., Any]) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(EngineDied, match="does not answer"):
        load(refuse)


def test_what_cannot_be_asked_is_refused(load: Callable[..., Any]) -> None:
    with pytest.raises(InvalidSetting, match="base_url"):
        load(answers(), base_url=None)
    engine = load(answers())
    for wrong in ({"k": 0}, {"k": VOCAB_SIZE + 1}, {"tail_samples": 1}, {"min_prob": -1.0}):
        with pytest.raises(InvalidSetting):
            engine.score([SEQUENCE], **({"k": 4, "tail_samples": 0, "seed": 0} | wrong))
    with pytest.raises(UnscorableSequence):
        engine.score([np.zeros(8, np.int32)], k=4, tail_samples=0, seed=0)


@pytest.fixture
def vllm_server(teacher_dir: Path, tmp_path: Path) -> Iterator[str]:
    """vLLM's own HTTP server with the small real teacher."""
    from teachercache.service.engines.vllm.options import set_environment

    set_environment(on_gpu=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(teacher_dir)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max-logprobs", "64", "--max-model-len", "256"]
    command += ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--served-model-name", "small"]
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert time.monotonic() < deadline and server.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.vllm
def test_rows_are_those_of_transformers(teacher_dir: Path, vllm_server: str) -> None:
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 49_000, length).astype(np.int32) for length in (2, 30, 255)]
    engine = load_engine("openai", teacher_dir, dtype="float32", base_url=vllm_server)
    ours = dict(engine.score(sequences, k=16, tail_samples=0, seed=0))
    theirs = dict(load_engine("transformers", teacher_dir).score(sequences, k=16, tail_samples=0, seed=0))
    for index in ours:
        np.testing.assert_allclose(ours[index].logprobs_PK, theirs[index].logprobs_PK, atol=1e-3)
        assert (ours[index].token_ids_PK == theirs[index].token_ids_PK).mean() > 0.99
        masses = (np.exp(rows[index].log_tail_mass_P) for rows in (ours, theirs))
        np.testing.assert_allclose(*masses, atol=1e-4)
    with pytest.raises(EngineError, match="--max-logprobs"):
        list(engine.score(sequences[:1], k=65, tail_samples=0, seed=0))
    engine.close()
