"""What part of a host each replica gets, and that each works on tasks of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_server import TinyServer, children, random_examples, tiny_teacher, wait_for, write_examples

from teachercache.service import devices
from teachercache.service.devices import VISIBLE, environments, visible_gpus
from teachercache.service.engine_choice import EngineChoice
from teachercache.service.errors import InvalidSettings

__all__ = ["tiny_teacher"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of which tests say what it has."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(devices, "visible_gpus", lambda: visible_gpus(tmp_path))
    monkeypatch.setattr(devices, "num_cores", lambda: 8)
    return tmp_path


def test_gpus_are_those_of_the_host_or_those_that_are_named(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (gpus / name).touch()
    assert visible_gpus(gpus) == ["0", "2", "10"]
    monkeypatch.setenv(VISIBLE, "GPU-a, 3")
    assert visible_gpus(gpus) == ["GPU-a", "3"]
    for none in ("", "-1"):
        monkeypatch.setenv(VISIBLE, none)
        assert visible_gpus(gpus) == []


def test_each_replica_gets_gpus_of_its_own(gpus: Path) -> None:
    for number in range(5):
        (gpus / f"nvidia{number}").touch()
    assert environments(2, 2) == [{VISIBLE: "0,1"}, {VISIBLE: "2,3"}]
    assert environments(1, 2) == [{}]
    with pytest.raises(InvalidSettings, match="need 6, and 5 are visible: ask for at most 2"):
        environments(3, 2)


def test_without_gpus_the_cores_are_shared(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environments(3, 1) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert environments(16, 1)[0] == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environments(2, 1) == [{"OMP_NUM_THREADS": "5"}] * 2


def test_a_teacher_takes_the_gpus_that_vllm_spreads_it_over() -> None:
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert EngineChoice("vllm", engine_args=sizes).gpus == 8
    assert EngineChoice().gpus == 1
    with pytest.raises(InvalidSettings, match="tensor_parallel_size"):
        _ = EngineChoice("vllm", engine_args={"tensor_parallel_size": "two"}).gpus


def test_replicas_work_on_tasks_of_their_own(tiny_teacher: Path, tmp_path: Path) -> None:
    data = write_examples(tmp_path / "data.parquet", random_examples(120))
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}", "--replicas", "2") as server:
        view = server.complete(server.upload(data), shard_positions=64)
        assert len(list(server.sequences(server.manifest(view["id"])))) == 120
        logs = [(server.data_dir / "logs" / name).read_text() for name in ("worker.log", "worker-1.log")]
        ranges = [{line.split()[-1] for line in log.splitlines() if " range " in line} for log in logs]
        assert all(ranges), "each had a part"
        assert not ranges[0] & ranges[1]
        assert len(ranges[0] | ranges[1]) == view["shards_total"]
        workers = children(server.process.pid)
        assert len(workers) == 2
        assert "2 running" in server.http.get("/readyz").text
    wait_for(lambda: None if any(Path(f"/proc/{pid}").exists() for pid in workers) else True)
