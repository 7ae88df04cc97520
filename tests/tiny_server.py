"""A real server process on loopback with a tiny random teacher, and what tests do to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest

from teachercache.format_spec import Example, Manifest, ScoredSequence, Shard, digest_file, write_dataset

VOCAB_SIZE = 300
MAX_LENGTH = 64
TIMEOUT_S = 60.0

T = TypeVar("T")


def make_teacher(folder: Path, seed: int = 0) -> Path:
    """Save a random Llama of 40 thousand weights with a byte tokenizer and a chat template."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny teacher's folder."""
    return make_teacher(tmp_path_factory.mktemp("teacher"))


class TinyServer:
    """`teachercache serve` in a process of its own; commands and requests of tests go through it."""

    def __init__(self, data_dir: Path, *arguments: str, **environment: str) -> None:
        self.data_dir = data_dir
        command = [sys.executable, "-m", "teachercache", "serve", "--port", "0", "--data-dir", str(data_dir)]
        command += ["--free-space-reserve", "0", *arguments]
        self.log = data_dir.with_name(data_dir.name + ".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment}
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://"), self.log.read_text()
        self.url = line.split()[-1].replace("0.0.0.0", "127.0.0.1")
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)

    def __enter__(self) -> TinyServer:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.returncode is None:
            self.end(signal.SIGTERM, 0)

    def end(self, number: int, code: int) -> None:
        """Send the server a signal, and check the exit code that it ends with."""
        self.http.close()
        self.process.send_signal(number)
        assert self.process.wait(30) == code, self.log_text()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def worker(self) -> int | None:
        """Return the worker's process id."""
        return next(iter(children(self.process.pid)), None)

    def upload(self, path: Path) -> str:
        """Upload a data set and return its digest."""
        digest = digest_file(path)
        answer = self.http.put(f"/v1/blobs/{digest}", content=path.read_bytes())
        assert answer.status_code in (200, 201), answer.text
        return digest

    def submit(self, data: str, teacher: str = "tiny", **settings: Any) -> httpx.Response:
        """Post a request."""
        return self.http.post("/v1/requests", json={"teacher": teacher, "data": data, **settings})

    def get(self, request_id: str) -> dict[str, Any]:
        """Return the view of a request."""
        view: dict[str, Any] = self.http.get(f"/v1/requests/{request_id}").raise_for_status().json()
        return view

    def wait(
        self,
        request_id: str,
        until: Callable[[dict[str, Any]], bool] | None = None,
        seconds: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """Return the view of a request once it satisfies `until`, by default once it is complete or failed."""
        until = until or (lambda view: view["state"] in ("complete", "failed"))

        def poll() -> dict[str, Any] | None:
            view = self.get(request_id)
            return view if until(view) else None

        return wait_for(poll, self.log_text, seconds)

    def complete(self, data: str, **settings: Any) -> dict[str, Any]:
        """Submit a request and return its view once it is complete."""
        view = self.wait(self.submit(data, **settings).json()["id"])
        assert view["state"] == "complete", view["error"]
        return view

    def manifest(self, request_id: str) -> Manifest:
        """Return the newest manifest of a request."""
        return Manifest.from_bytes(self.http.get(f"/v1/requests/{request_id}/manifest").raise_for_status().content)

    def sequences(self, manifest: Manifest) -> Iterator[ScoredSequence]:
        """Yield what the shards of a manifest hold."""
        for descriptor in manifest.shards:
            data = self.http.get(f"/v1/blobs/{descriptor.digest}").raise_for_status().content
            assert len(data) == descriptor.bytes
            yield from Shard(data)

    def log_text(self) -> str:
        """Return what server and worker logged."""
        worker_log = self.data_dir / "logs" / "worker.log"
        return self.log.read_text() + (worker_log.read_text() if worker_log.exists() else "")


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that still run."""
    # each thread has its own
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in lists for child in children if runs(int(child))]


def runs(pid: int) -> bool:
    """Tell whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(poll: Callable[[], T | None], describe: Callable[[], str] = lambda: "", seconds: float = TIMEOUT_S) -> T:
    """Return the first value of `poll` that is not None."""
    deadline = time.monotonic() + seconds
    while (value := poll()) is None:
        assert time.monotonic() < deadline, f"waited for {seconds} s\n{describe()}"
        time.sleep(0.02)
    return value


def random_examples(count: int, seed: int = 0, longest: int = MAX_LENGTH) -> list[Example]:
    """Return sequences of 2 to `longest` random tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, longest + 1, count)
    return [Example(input_ids=random.integers(0, VOCAB_SIZE, length)) for length in lengths]


def write_examples(path: Path, examples: list[Example]) -> Path:
    """Write a data set."""
    write_dataset(path, examples)
    return path


def problem(answer: httpx.Response) -> dict[str, Any]:
    """Return the problem in an answer, which must be well-formed."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body: dict[str, Any] = json.loads(answer.content)
    assert body["status"] == answer.status_code and body["instance"] == answer.request.url.path
    assert set(body) >= {"type", "title", "status", "detail", "instance", "code", "retryable"}
    return body
