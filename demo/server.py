"""A cache server of the demo's own: started on a free loopback port, ended with the demo."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from .errors import ServerFailed

START_S = 120.0
STOP_S = 30.0
LEAVE_S = 60.0


@contextlib.contextmanager
def serve(teacher_name: str, teacher: Path, data_dir: Path) -> Iterator[str]:
    """Run `teachercache serve` and yield its URL; its worker leaves as soon as there is nothing to score.

    Raises:
        ServerFailed: it ended, or did not listen in time; the message ends with what it said last.
    """
    command = [sys.executable, "-m", "teachercache", "serve", "--teacher", f"{teacher_name}={teacher}"]
    command += [
        "--data-dir",
        str(data_dir),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--dtype",
        "float32",
        "--idle-seconds",
        "0",
    ]
    data_dir.mkdir(parents=True, exist_ok=True)
    log = data_dir / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_without_proxies())
    try:
        yield _wait_until_listening(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_teacher_left(url: str) -> None:
    """Wait until the server has no worker process, and so no teacher in memory.

    Raises:
        ServerFailed: it is still there after a minute.
    """
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline:
        checks = httpx.get(f"{url}/readyz", trust_env=False).json()["checks"]
        if all(check["detail"] != "running" for check in checks if check["name"] == "worker"):
            return
        time.sleep(0.2)
    raise ServerFailed("the teacher's process is still there a minute after its work was done")


def _wait_until_listening(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"listening on (http://\S+)", log.read_text())
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    said = log.read_text().strip().splitlines()[-1:] or ["nothing"]
    raise ServerFailed(f"the cache server did not start (exit {process.poll()}); it said: {said[0]}")


def _without_proxies() -> dict[str, str]:
    names = {"http_proxy", "https_proxy", "all_proxy"}
    return {name: value for name, value in os.environ.items() if name.lower() not in names}
