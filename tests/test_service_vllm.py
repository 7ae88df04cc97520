"""`teachercache serve --engine vllm`: a request, an engine that is killed under it, and a complete cache."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tiny_server import TinyServer, children, runs, wait_for

from teachercache.format_spec import Example, write_dataset

pytestmark = pytest.mark.vllm

SEQUENCES, LENGTH = 24, 100


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Token ids of 24 sequences."""
    random = np.random.default_rng(3)
    path = tmp_path / "data.parquet"
    write_dataset(path, [Example(input_ids=random.integers(0, 49_000, LENGTH)) for _ in range(SEQUENCES)])
    return path


def test_a_cache_is_complete_though_the_engine_is_killed(teacher_dir: Path, tmp_path: Path, dataset: Path) -> None:
    arguments = ["--engine", "vllm", "--dtype", "float32", "--engine-arg", "max_model_len=128"]
    with TinyServer(tmp_path / "data", *arguments, "--teacher", f"tiny={teacher_dir}") as server:
        data = server.upload(dataset)
        answer = server.submit(data, shard_positions=600).json()
        assert answer["request"]["engine"] == "vllm" and answer["request"]["tail_samples"] == 16
        server.wait(answer["id"], lambda view: view["state"] == "failed" or view["positions_done"] > 0, 200)
        worker = server.worker()
        assert worker is not None
        cores = [pid for pid in children(worker) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(cores[0], signal.SIGKILL)
        view = server.wait(answer["id"], seconds=300)
        assert view["state"] == "complete", (view["error"], server.log_text()[-2000:])
        assert server.worker() == worker, "the worker survives its engine"
        assert "is loaded again" in server.log_text()
        manifest = server.manifest(answer["id"])
        scored = list(server.sequences(manifest))
        assert len(scored) == SEQUENCES and manifest.fingerprint.engine == "vllm"
        assert all(not item.rows.absent_P.any() and item.rows.tail_samples == 16 for item in scored)
        processes = [worker, *children(worker)]
    wait_for(lambda: None if any(runs(pid) for pid in processes) else True)
