"""The server as a process: what it imports, how it starts, refuses to start and ends; and the document about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tiny_server import TinyServer, tiny_teacher

from teachercache.format_spec import Code

__all__ = ["tiny_teacher"]


@pytest.fixture(scope="module")
def server(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    """A server with a tiny teacher."""
    with TinyServer(tmp_path_factory.mktemp("serve") / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        yield server


def test_the_api_process_imports_nothing_that_computes(server: TinyServer) -> None:
    maps = {Path(line.split()[-1]).name for line in Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()}
    assert any(name.startswith("_sqlite3") for name in maps)
    assert not [name for name in maps if "torch" in name or "tokenizers" in name or "arrow" in name]
    script = "import sys, teachercache.service.server; print([m for m in sys.modules if m.split('.')[0] in"
    script += " ('torch', 'transformers', 'vllm', 'tokenizers', 'pyarrow')])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_openapi_names_every_endpoint_of_the_document(server: TinyServer) -> None:
    text = (Path(__file__).parent.parent / "service" / "API.md").read_text()
    documented = set()
    for methods, path in re.findall(r"^\d\.\d `((?:[A-Z]+(?:`, `)?)+) (/[^`?]*)", text, re.MULTILINE):
        documented |= {(method, path) for method in methods.split("`, `") if method != "HEAD"}
    documented |= {("GET", path) for path in re.findall(r"`GET (/[a-z]+)`", text)}
    paths = server.http.get("/openapi.json").json()["paths"]
    served = {(method.upper(), path.replace("request_id", "id")) for path, item in paths.items() for method in item}
    assert served == documented


def test_the_document_lists_the_codes() -> None:
    text = (Path(__file__).parent.parent / "service" / "API.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (yes|no) \|$", text, re.MULTILINE)
    expected = [(c.wire, str(c.status), str(c.exit_code), "yes" if c.retryable else "no") for c in Code]
    assert rows == expected


def run_serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `serve` that must end by itself."""
    command = [sys.executable, "-m", "teachercache", "serve", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def test_servers_that_cannot_start_say_why_in_one_line(server: TinyServer, tmp_path: Path, tiny_teacher: Path) -> None:
    port = server.url.rpartition(":")[2]
    fresh = ["--port", "0", "--data-dir", str(tmp_path / "data")]
    for arguments, environment, words, code in (
        (
            ["--port", "0", "--data-dir", str(server.data_dir)],
            {},
            f"is already served by process {server.process.pid}",
            2,
        ),
        (["--port", port, "--data-dir", str(tmp_path / "data")], {}, f"port {port} of 127.0.0.1 is in use", 2),
        ([*fresh, "--host", "0.0.0.0"], {}, "there is no token yet: make one with teachercache token create", 2),
        ([*fresh, "--teacher", str(tiny_teacher)], {}, "a teacher is given as NAME=PATH", 2),
        ([*fresh, "--teacher", "x=/no/such/folder"], {}, "/no/such/folder is neither a folder nor a hub id", 3),
        ([*fresh, "--teacher", f"x={tmp_path}"], {}, "config.json cannot be read", 2),
        ([*fresh, "--engine", "magic"], {}, "unknown engine 'magic'", 2),
        ([*fresh, "--dtype", "int3"], {}, "unknown dtype 'int3'", 2),
        (fresh, {"TEACHERCACHE_PROT": "1"}, "TEACHERCACHE_PROT", 2),
    ):
        ended = run_serve(*arguments, **environment)
        assert ended.returncode == code and ended.stdout == "", ended.stderr
        lines = [line for line in ended.stderr.splitlines() if line.startswith("teachercache: error: ")]
        assert len(lines) == 1 and words in lines[0]
        assert "Traceback" not in ended.stderr


def test_sigterm_ends_a_server_with_success(tmp_path: Path) -> None:
    with TinyServer(tmp_path / "data", "--drain-seconds", "5") as server:
        assert server.http.get("/healthz").status_code == 200
        server.end(signal.SIGTERM, 0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")
