"""The client's verbs on the command line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_server import FaultyServer, make_cache

from teachercache.cli import main

CACHE = make_cache()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with FaultyServer().running() as running:
        monkeypatch.setenv("TEACHERCACHE_URL", running.url)
        monkeypatch.setenv("TEACHERCACHE_CACHE_DIR", str(tmp_path / "cache"))
        running.add(CACHE)
        yield running


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    return path


def test_submit_without_waiting(server: FaultyServer, jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["submit", str(jsonl), "--k", "7", "--tail-samples", "3", "--seed", "4", "--shard-positions", "99"]
    arguments += ["--min-prob", "0.0100"]
    assert main([*arguments, "--no-wait", "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    asked = {name: view["request"][name] for name in ("k", "min_prob", "tail_samples", "seed", "shard_positions")}
    assert asked == {"k": 7, "min_prob": "0.01", "tail_samples": 3, "seed": 4, "shard_positions": 99}
    assert (view["state"], view["created"]) == ("queued", True)
    assert view["request"]["data"] in server.blobs
    assert main([*arguments, "--no-wait"]) == 0
    assert capsys.readouterr().out == f"request   {view['id']} (exists)\n"


def test_submit_waits(server: FaultyServer, jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["submit", str(jsonl), "--teacher", "tiny", "--no-wait", "--json"])
    request_id = json.loads(capsys.readouterr().out)["id"]
    server.views[request_id] |= {"state": "complete", "manifest": CACHE.manifest.digest}
    assert main(["submit", str(jsonl), "--teacher", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert out == f"request   {request_id} (exists)\nmanifest  {CACHE.manifest.digest}\n"
    assert err == "teacher: complete\n"


def test_failed_request_is_the_exit_code(server: FaultyServer, jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["submit", str(jsonl), "--no-wait", "--json"])
    request_id = json.loads(capsys.readouterr().out)["id"]
    server.views[request_id] |= {"state": "failed", "error": {"code": "internal", "detail": "the engine died"}}
    assert main(["submit", str(jsonl)]) == 5
    assert main(["wait", request_id]) == 5
    assert "the engine died" in capsys.readouterr().err
    assert main(["status", request_id]) == 0
    assert "error    the engine died [internal]" in capsys.readouterr().out
    assert main(["retry", request_id]) == 0
    assert "state    queued" in capsys.readouterr().out


def test_dry_run(server: FaultyServer, jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(jsonl), "--dry-run"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == {"request", "sequences", "tokens", "bytes", "time"}
    assert (lines["tokens"], lines["bytes"], lines["time"]) == ("90", "2500 (2.5 kB)", "not known yet")
    assert len(server.views) == 1


def test_a_wrong_setting_is_refused_before_the_upload(
    server: FaultyServer, jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(jsonl), "--min-prob", "1e-3"]) == 2
    assert "min_prob must be a decimal from 0 to below 1" in capsys.readouterr().err
    assert server.count("PUT", "/v1/blobs") == 0


def test_teacher_must_be_clear(
    server: FaultyServer, jsonl: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teachercache.client.Client.teachers", lambda self: [])
    assert main(["submit", str(jsonl)]) == 2
    assert "name the teacher with --teacher; the server has []" in capsys.readouterr().err


def test_wait_timeout(server: FaultyServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.add(CACHE, shards=1)
    assert main(["wait", CACHE.id, "--timeout", "0.1"]) == 7
    done, total = CACHE.partial(1).num_positions, CACHE.manifest.num_positions
    assert capsys.readouterr().err.splitlines()[0] == f"teacher: {100 * done // total}% running"


def test_status_and_ls(server: FaultyServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", CACHE.id]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    total = CACHE.manifest.num_positions
    assert (lines["state"], lines["tokens"], lines["shards"]) == ("complete", f"{total} of {total}", "3 of 3")
    assert main(["status", CACHE.id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == CACHE.id
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == f"{CACHE.id}  complete    100%  2026-01-01T00:00:00Z  tiny\n"
    assert main(["ls", "--json"]) == 0
    assert [view["id"] for view in json.loads(capsys.readouterr().out)] == [CACHE.id]


@pytest.mark.parametrize("name", [CACHE.id, CACHE.manifest.digest])
def test_pull(server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["pull", name, str(tmp_path / "out"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert sum(line.startswith("pull:") for line in err.splitlines()) == 1
    summary = json.loads(out)
    assert (summary["shards"], summary["manifest"]) == (3, CACHE.manifest.digest)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == CACHE.manifest.to_bytes()


def test_errors_are_one_line(
    server: FaultyServer, jsonl: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl.write_text('{"text": "one"}\nnonsense\n')
    assert main(["submit", str(jsonl)]) == 2
    assert "data.jsonl line 2" in capsys.readouterr().err
    assert main(["status", "0" * 64]) == 3
    monkeypatch.setattr("teachercache.client.commands.RETRY_S", 0.1)
    assert main(["ls", "--url", "http://127.0.0.1:9"]) == 75
    err = capsys.readouterr().err
    assert err.splitlines()[0] == f"teachercache: error: the server has no {'0' * 64} [not_found]"


def test_bar_on_a_terminal(server: FaultyServer, tmp_path: Path) -> None:
    """Standard error of a real terminal gets the bar, standard output only the answer."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "teachercache", "pull", CACHE.id, str(tmp_path / "out")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=os.environ | {"TERM": "xterm"})
    os.close(follower)
    seen = b""
    while True:
        try:
            block = os.read(leader, 4096)
        except OSError:
            break
        if not block:
            break
        seen += block
    os.close(leader)
    out, _ = run.communicate()
    assert run.returncode == 0
    assert b"100%" in seen
    assert b"pull" in seen
    assert b"directory" in out
