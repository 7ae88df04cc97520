"""The engine that asks a vLLM server which runs already: plain top-k over HTTP, slower than every other way.

What is behind the address cannot be proven: the server's word is taken for the model, and its numbers for the
teacher's. Shapes: P positions, K kept entries.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from ...format_spec import Code, Fingerprint, Generation, Rows
from ..teachers import read_config
from .errors import EngineDied, EngineError, InvalidSetting
from .plain_rows import plain_rows
from .sequences import Ids, check_sequences

TIMEOUT_S = 600.0
CONCURRENCY = 16
# vLLM writes it for -inf, which JSON lacks
CLAMPED = -9999.0
KEY_VARIABLE = "OPENAI_API_KEY"


class OpenAIEngine:
    """A model that a vLLM server serves by `/v1/completions`, with token ids in and `prompt_logprobs` out.

    `base_url` ends before `/v1`; `model` is the server's name for it, and may be left out where there is one. A key
    is read from `OPENAI_API_KEY`. `dtype` is what the user says that the server runs it with; it is not checked.

    Raises:
        InvalidSetting: no address, or the server has no such model.
        EngineDied: the server does not answer.
    """

    name = "openai"
    draws_tail_samples = False

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str,
        head_dtype: str = "unknown",
        base_url: str | None = None,
        model: str | None = None,
        concurrency: int = CONCURRENCY,
    ) -> None:
        if not base_url:
            raise InvalidSetting("the openai engine needs --engine-arg base_url=http://HOST:PORT")
        self._dtype, self._head_dtype, self._concurrency = dtype, head_dtype, concurrency
        self.vocab_size = read_config(Path(path)).vocab_size
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=base_url.rstrip("/"), headers=headers, timeout=TIMEOUT_S)
        try:
            self._model, length = self._find(model)
            # the server wants room for the one token that it generates
            self.max_length = length - 1
            self._version = str(self._get("/version").get("version", "unknown"))
        except BaseException:
            self.close()
            raise

    def fingerprint(self, teacher: str, tokenizer: str) -> Fingerprint:
        """Return who is said to produce the numbers, given the digests of the teacher and of its tokenizer."""
        return Fingerprint(
            teacher=teacher,
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            engine=self.name,
            dtype=self._dtype,
            head_dtype=self._head_dtype,
            device="unknown",
            kernel=f"path=completions model={self._model} identity=unproven",
            software={"vllm": self._version},
        )

    def score(
        self, sequences: Sequence[Ids], *, k: int, tail_samples: int, seed: int, min_prob: float = 0.0
    ) -> Iterator[tuple[int, Rows]]:
        """Yield each sequence's number and rows, from short to long; see `Engine.score`."""
        if not 1 <= k <= self.vocab_size:
            raise InvalidSetting(
                f"k {k} is outside 1 .. {self.vocab_size}, the teacher's vocabulary", Code.K_OUT_OF_RANGE
            )
        if tail_samples:
            raise InvalidSetting(
                f"an API gives no tail to draw {tail_samples} samples from; ask for 0", Code.TAIL_SAMPLES_UNAVAILABLE
            )
        if not 0 <= min_prob <= 1:
            raise InvalidSetting(f"min_prob {min_prob} is outside 0 .. 1")
        check_sequences(sequences, num_embeddings=self.vocab_size, max_length=self.max_length)
        return self._score(sequences, k, min_prob)

    def generate(
        self, prompts: Sequence[Ids], settings: Generation, seeds: Sequence[int]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Refuse: which tokens a server generates, its answer does not tell for sure."""
        raise InvalidSetting("engine 'openai' scores what it is given, and does not generate")

    def close(self) -> None:
        """End the connections."""
        self._http.close()

    def _score(self, sequences: Sequence[Ids], k: int, min_prob: float) -> Iterator[tuple[int, Rows]]:
        waiting = deque(sorted(range(len(sequences)), key=lambda index: len(sequences[index])))
        sent: deque[tuple[int, Future[Rows]]] = deque()
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            while waiting or sent:
                while waiting and len(sent) < self._concurrency:
                    index = waiting.popleft()
                    sent.append((index, pool.submit(self._one, sequences[index], k, min_prob)))
                index, future = sent.popleft()
                yield index, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _one(self, ids: Ids, k: int, min_prob: float) -> Rows:
        body = {
            "model": self._model,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": k,
        }
        choice = self._answer(self._send("POST", "/v1/completions", json=body), "choices")[0]
        positions = choice.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(ids):
            raise EngineError(f"the server gave no prompt_logprobs for each of {len(ids)} tokens; is it vLLM?")
        token_ids_PK, logprobs_PK = np.zeros((len(ids) - 1, k), np.int32), np.zeros((len(ids) - 1, k), np.float32)
        for row, entries in enumerate(positions[1:]):
            # the token itself is among them, also where it is not in the top k
            found = sorted((-entry["logprob"], int(token)) for token, entry in entries.items())[:k]
            if len(found) < k or str(ids[row + 1]) not in entries:
                raise EngineError(
                    f"the server gave {len(found)} entries of {k} at token {row}, or other tokens than asked"
                )
            token_ids_PK[row] = [token for _, token in found]
            logprobs_PK[row] = [-value for value, _ in found]
        logprobs_PK[logprobs_PK <= CLAMPED] = -np.inf
        return plain_rows(token_ids_PK, logprobs_PK, min_prob)

    def _find(self, model: str | None) -> tuple[str, int]:
        """Return the name and the longest context of the model."""
        served = {item["id"]: item for item in self._answer(self._send("GET", "/v1/models"), "data")}
        if model is None and len(served) == 1:
            (model,) = served
        if model is None or model not in served:
            raise InvalidSetting(
                f"the server has no model {model!r}; name one with --engine-arg model=: {sorted(served)}"
            )
        length = served[model].get("max_model_len")
        if not isinstance(length, int):
            raise InvalidSetting(f"the server does not say max_model_len of {model!r}; is it vLLM?")
        return model, length

    def _get(self, path: str) -> Any:
        return self._send("GET", path).json()

    def _answer(self, response: httpx.Response, key: str) -> Any:
        try:
            return response.json()[key]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{response.url.path} did not answer as an OpenAI API does: no {key!r}") from error

    def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise EngineDied(f"the server at {self._http.base_url} does not answer: {error}") from error
        if response.status_code >= 500:
            raise EngineDied(f"{path} answered {response.status_code}: {response.text[:300]}")
        if response.status_code >= 400:
            hint = "; start it with --max-logprobs" if "logprobs" in response.text else ""
            raise EngineError(f"{path} answered {response.status_code}: {response.text[:300]}{hint}")
        return response
