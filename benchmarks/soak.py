"""A server with a vLLM teacher at work for a long time, whose engine is killed now and then.

`teachercache serve --engine vllm` gets one request after the other, each of the same real text with another seed, until
`--minutes` are over; vLLM's engine is killed (SIGKILL) `--kills` times at even distances, with work under way. Then
every request must be complete, every shard readable with every sequence in it, and the last cache is audited with the
transformers engine, beside the audits that the server makes of its own shards. Memory of the server, its worker
and vLLM is written down every ten seconds. Run it where vLLM is: .venv-vllm/bin/python benchmarks/soak.py
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from _results import arguments, finish, need_vllm

from teachercache.client import Client
from teachercache.demo.model import ensure_model
from teachercache.demo.text import load_documents
from teachercache.format_spec import Example, Manifest, Shard, write_dataset

SEQUENCES, LENGTH, SHARD_POSITIONS = 64, 256, 4096
SAMPLE_S = 10.0
# a request is far from its end when it is this far from its beginning
KILL_AFTER_POSITIONS = 1024


def write_text(path: Path, teacher: Path) -> None:
    """Python's own documentation, cut into sequences."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    ids = itertools.chain.from_iterable(tokenizer.encode(document.text).ids for document in load_documents())
    sequences = [list(itertools.islice(ids, LENGTH)) for _ in range(SEQUENCES)]
    import numpy as np

    write_dataset(path, (Example(input_ids=np.array(sequence)) for sequence in sequences))


class Watch:
    """The server's processes: their memory, and the engine among them."""

    def __init__(self, pid: int) -> None:
        self.server = psutil.Process(pid)
        self.samples: list[dict[str, float]] = []
        self._next = 0.0

    def family(self) -> dict[str, psutil.Process]:
        """The processes by what they are."""
        found = {"server": self.server}
        for process in self.server.children(recursive=True):
            command = " ".join(process.cmdline())
            if "EngineCore" in command:
                found["engine"] = process
            elif " worker " in command:
                found["worker"] = process
        return found

    def sample(self, since: float) -> None:
        """Write the memory down, every ten seconds."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SAMPLE_S
        memory = {"s": round(time.monotonic() - since, 1)}
        for name, process in self.family().items():
            try:
                memory[f"{name}_mb"] = round(process.memory_info().rss / 2**20, 1)
            except psutil.NoSuchProcess:
                continue
        self.samples.append(memory)

    def kill_engine(self) -> int | None:
        """Kill vLLM's engine, if there is one."""
        engine = self.family().get("engine")
        if engine is None:
            return None
        engine.send_signal(signal.SIGKILL)
        return int(engine.pid)


def start(folder: Path, teacher: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return it and its address."""
    command = [sys.executable, "-m", "teachercache", "serve", "--port", "0", "--data-dir", str(folder / "data")]
    command += ["--engine", "vllm", "--dtype", "float32", "--engine-arg", f"max_model_len={LENGTH}"]
    command += ["--teacher", f"teacher={teacher}"]
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    found = re.search(r"listening on (http://\S+)", server.stdout.readline())
    assert found is not None, (folder / "serve.log").read_text()
    return server, found[1]


def soak(folder: Path, minutes: float, kills: int) -> dict[str, Any]:
    """Run the server and return the figures."""
    teacher = ensure_model()
    data = folder / "data.parquet"
    write_text(data, teacher)
    server, url = start(folder, teacher)
    watch, begin = Watch(server.pid), time.monotonic()
    kill_at = [minutes * 60 * (n + 1) / (kills + 1) for n in range(kills)]
    killed: list[dict[str, float]] = []
    views = []
    try:
        with Client(url, cache_dir=folder / "cache") as client:
            digest = client.upload(data)
            for seed in itertools.count():
                elapsed = time.monotonic() - begin
                if elapsed > minutes * 60 and not kill_at:
                    break
                view = client.submit(teacher="teacher", data=digest, seed=seed, shard_positions=SHARD_POSITIONS)
                while not view.is_finished:
                    time.sleep(0.5)
                    view = client.status(view.id)
                    view.raise_if_failed()
                    elapsed = time.monotonic() - begin
                    watch.sample(begin)
                    under_way = view.positions_done > KILL_AFTER_POSITIONS
                    if kill_at and elapsed > kill_at[0] and under_way and (pid := watch.kill_engine()):
                        kill_at.pop(0)
                        killed.append({"s": round(elapsed, 1), "pid": pid, "positions_done": view.positions_done})
                        say(f"killed engine {pid} after {elapsed:.0f} s")
                views.append(view)
                say(f"request {seed}: {view.state} after {elapsed:.0f} s, {view.tokens_per_s:.0f} tok/s")
            figures = check(client, url, folder, teacher, [view.id for view in views])
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    log = (folder / "data" / "logs" / "worker.log").read_text()
    scored = sum(view.teacher_tokens_scored for view in views)
    return {
        "minutes": (time.monotonic() - begin) / 60,
        "requests": len(views),
        "tokens": len(views) * SEQUENCES * LENGTH,
        "tokens_scored": scored,
        "kills": killed,
        "engines_loaded_again": log.count("it is loaded again"),
        "server_exit_code": code,
        **figures,
        **flatness(watch.samples),
        "memory": watch.samples,
    }


def check(client: Client, url: str, folder: Path, teacher: Path, requests: list[str]) -> dict[str, Any]:
    """Read every shard of every request; audit the last cache with another engine."""
    import httpx

    shards = sequences = 0
    qualities = []
    for request in requests:
        answer = httpx.get(f"{url}/v1/requests/{request}/manifest", trust_env=False).raise_for_status()
        manifest = Manifest.from_bytes(answer.content)
        assert manifest.complete, request
        qualities.append(manifest.quality)
        for descriptor in manifest.shards:
            blob = httpx.get(f"{url}/v1/blobs/{descriptor.digest}", trust_env=False).raise_for_status().content
            for sequence in Shard(blob):
                assert not sequence.rows.absent_P.any() and len(sequence) == LENGTH
                sequences += 1
            shards += 1
    assert sequences == len(requests) * SEQUENCES, "a sequence is missing or stands twice"
    client.pull(requests[-1], folder / "pulled")
    command = [sys.executable, "-m", "teachercache", "audit", str(folder / "pulled"), "--teacher", str(teacher)]
    done = subprocess.run([*command, "--engine", "transformers", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        "shards": shards,
        "sequences": sequences,
        "audited_rows": sum(quality.audited_rows for quality in qualities),
        "audit_mean_kl": max(float(quality.audit_mean_kl) for quality in qualities),
        "audit_max_kl": max(float(quality.audit_max_kl) for quality in qualities),
        "audit_draws_z": max(abs(float(quality.audit_draws_z)) for quality in qualities),
        "audit_by_transformers": json.loads(done.stdout),
    }


def flatness(samples: list[dict[str, float]]) -> dict[str, float]:
    """Memory in the last quarter over that in the second one, by process; a load's own growth is left out."""
    found = {}
    for name in ("server_mb", "worker_mb", "engine_mb"):
        values = [sample[name] for sample in samples if name in sample]
        quarter = max(1, len(values) // 4)
        early, late = values[quarter : 2 * quarter] or values, values[-quarter:]
        found[f"{name}_late"] = statistics.median(late)
        found[f"{name}_ratio"] = statistics.median(late) / statistics.median(early)
    return found


def say(text: str) -> None:
    """Print progress beside the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = arguments("A vLLM teacher at work for long, killed now and then; see the module.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=3)
    args = parser.parse_args()
    need_vllm()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        finish("soak", soak(Path(scratch), args.minutes, args.kills), ["vllm", "torch", "numpy"], args)
