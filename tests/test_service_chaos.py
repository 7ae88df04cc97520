"""kill -9 of the server or its worker at random moments, again and again: nothing lost, nothing torn, nothing wrong.

Three kills by default; `python -m pytest -m chaos --kills 200` takes most of an hour.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_server import TinyServer, random_examples, runs, tiny_teacher, wait_for, write_examples

from teachercache.format_spec import Example, Manifest, Rows, Shard, content_key, digest_bytes
from teachercache.service.engines import load_engine

__all__ = ["tiny_teacher"]

SEQUENCES, SHARD_POSITIONS = 60, 40
LONGEST_LIFE_S = 8.0


class Chaos:
    """A data directory whose server is killed and started, and what its manifests have promised."""

    def __init__(self, folder: Path, teacher: Path, seed: int) -> None:
        self.folder, self.teacher, self.random = folder, teacher, random.Random(seed)
        self.promised: dict[str, int] = {}
        self.requests: dict[str, list[Example]] = {}
        self.killed = {"server": 0, "worker": 0}
        self.server = self.start()

    def start(self) -> TinyServer:
        return TinyServer(self.folder / "data", "--teacher", f"tiny={self.teacher}", "--idle-seconds", "600")

    def submit(self, number: int) -> None:
        """Ask for another cache."""
        examples = random_examples(SEQUENCES, seed=number)
        data = self.server.upload(write_examples(self.folder / f"{number}.parquet", examples))
        answer = self.server.submit(data, k=4, tail_samples=2, shard_positions=SHARD_POSITIONS)
        assert answer.status_code in (200, 202), answer.text
        self.requests[answer.json()["id"]] = examples

    def remember(self) -> None:
        """Take down every shard that the newest manifests name; each must be there for ever."""
        for request in self.requests:
            answer = self.server.http.get(f"/v1/requests/{request}/manifest")
            if answer.status_code == 200:
                for shard in Manifest.from_bytes(answer.content).shards:
                    self.promised[shard.digest] = shard.bytes

    def kill(self) -> None:
        """Wait a moment, and kill one of the two."""
        deadline = time.monotonic() + self.random.uniform(0, LONGEST_LIFE_S)
        while time.monotonic() < deadline:
            self.remember()
            if all(self.server.get(request)["state"] == "complete" for request in self.requests):
                self.submit(len(self.requests))
            time.sleep(0.05)
        worker = self.server.worker()
        if worker is not None and self.random.random() < 0.5:
            os.kill(worker, signal.SIGKILL)
            self.killed["worker"] += 1
            return
        self.server.end(signal.SIGKILL, -signal.SIGKILL)
        self.killed["server"] += 1
        if worker is not None:
            wait_for(lambda: None if runs(worker) else True)
        self.server = self.start()

    def check(self) -> None:
        """Let all requests complete; read everything, and hold it against a direct run of the teacher."""
        for request in self.requests:
            assert self.server.wait(request, seconds=120)["state"] == "complete", self.server.log_text()[-3000:]
        self.remember()
        for digest, size in self.promised.items():
            blob = self.server.http.get(f"/v1/blobs/{digest}").raise_for_status().content
            assert digest_bytes(blob) == digest and len(blob) == size
        direct = load_engine("transformers", self.teacher)
        for request, examples in self.requests.items():
            manifest = self.server.manifest(request)
            found = [item for shard in manifest.shards for item in Shard(self.blob(shard.digest))]
            assert manifest.complete and [content_key(item.input_ids_L) for item in found] == [
                content_key(example.input_ids.astype(np.int32)) for example in examples
            ]
            expected = dict(direct.score([example.input_ids for example in examples], k=4, tail_samples=2, seed=0))
            for index, item in enumerate(found):
                assert_rows(item.rows, expected[index])

    def blob(self, digest: str) -> bytes:
        return self.server.http.get(f"/v1/blobs/{digest}").raise_for_status().content


def assert_rows(stored: Rows, direct: Rows) -> None:
    """The same but for the profile's rounding, and for the company that sequences had."""
    np.testing.assert_allclose(stored.logprobs_PK, direct.logprobs_PK, rtol=2.0**-8, atol=1e-3)
    assert (stored.token_ids_PK == direct.token_ids_PK).mean() > 0.99


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_nothing_is_lost_torn_or_wrong(
    tmp_path: Path, tiny_teacher: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = request.config.getoption("--kills")
    seed = int.from_bytes(os.urandom(4))
    chaos = Chaos(tmp_path, tiny_teacher, seed)
    try:
        chaos.submit(0)
        for _ in range(kills):
            chaos.kill()
        chaos.check()
    finally:
        chaos.server.end(signal.SIGTERM, 0)
    left = list((tmp_path / "data" / "staging").iterdir())
    with capsys.disabled():
        print(
            f"\nseed {seed}: {chaos.killed['server']} kills of the server, {chaos.killed['worker']} of its worker; "
            f"{len(chaos.requests)} requests, {len(chaos.promised)} shards; 0 lost, 0 torn, 0 wrong; "
            f"{len(left)} unfinished files left to be swept"
        )
