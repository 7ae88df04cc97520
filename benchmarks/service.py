"""What the server's HTTP costs: blobs against plain file servers and a raw read, requests a second, and memory.

A real server with a tiny teacher. A blob of `--blob-mb` is read over loopback by `--clients` at once, each into a
buffer that is thrown away, in turn from our server, from Starlette's static files under the same uvicorn, from Python's
own http.server, and from the file (warm in memory; all of them read it). `status` and `dedupe` are answered on 16
connections kept open. Memory is the API process's, after 10 shards were committed and fetched, and after `--shards`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from _results import arguments, finish

from teachercache.format_spec import Example, Manifest, digest_file, write_dataset

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_server import VOCAB_SIZE, make_teacher

ROUNDS = 5
CONNECTIONS = 16
STATIC = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.staticfiles import StaticFiles
app = Starlette()
app.mount("/", StaticFiles(directory=sys.argv[1]))
uvicorn.run(app, port=int(sys.argv[2]), log_level="error", access_log=False)
"""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Process:
    """A server in a process of its own."""

    def __init__(self, command: list[str], url: str | None = None) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        if url is None:
            found = re.search(r"listening on (http://\S+)", self.process.stdout.readline())
            assert found is not None, "the server did not start"
            url = found[1]
        self.url = url
        for _ in range(200):
            try:
                httpx.get(self.url, trust_env=False)
                return
            except httpx.TransportError:
                time.sleep(0.05)
        raise RuntimeError(f"{command[:4]} does not answer")

    def rss_mb(self) -> float:
        """Resident memory in MiB."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def end(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def read_http(url: str, path: str) -> int:
    """Read a body into a buffer that is thrown away; sockets and no client library, whose own cost is not meant."""
    host, port = url.removeprefix("http://").split(":")
    buffer = memoryview(bytearray(2**20))
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(65536)
        status, _, rest = head.partition(b"\r\n\r\n")
        assert status.split()[1] == b"200", status
        length = len(rest)
        while count := connection.recv_into(buffer):
            length += count
    return length


def read_file(path: Path) -> int:
    """Read a file into a buffer that is thrown away."""
    buffer = memoryview(bytearray(2**20))
    length = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            length += count
    return length


def throughput(read: Callable[[], int], clients: int, size: int) -> float:
    """MB a second of so many at once."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        lengths = list(pool.map(lambda _: read(), range(clients)))
    assert set(lengths) == {size}
    return clients * size / (time.perf_counter() - begin) / 1e6


def blobs(server: Process, data_dir: Path, blob: Path, clients: int) -> dict[str, float]:
    """Throughput of one blob, the ways in turn, `ROUNDS` times."""
    digest, size = digest_file(blob), blob.stat().st_size
    httpx.put(f"{server.url}/v1/blobs/{digest}", content=blob.read_bytes(), trust_env=False, timeout=120)
    stored = data_dir / "blobs" / "sha256" / digest[7:9] / digest[7:]
    ports = free_port(), free_port()
    starlette = Process(
        [sys.executable, "-c", STATIC, str(stored.parent), str(ports[0])], f"http://127.0.0.1:{ports[0]}"
    )
    plain = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(stored.parent)]
    python = Process([*plain, str(ports[1])], f"http://127.0.0.1:{ports[1]}")
    ways: dict[str, Callable[[], int]] = {
        "ours": lambda: read_http(server.url, f"/v1/blobs/{digest}"),
        "starlette": lambda: read_http(starlette.url, f"/{digest[7:]}"),
        "http_server": lambda: read_http(python.url, f"/{digest[7:]}"),
        "raw": lambda: read_file(stored),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(ROUNDS):
            for name, read in ways.items():
                rates[name].append(throughput(read, clients, size))
    finally:
        starlette.end()
        python.end()
    found = {f"blob_{name}_mb_s": statistics.median(values) for name, values in rates.items()}
    best = max(found["blob_starlette_mb_s"], found["blob_http_server_mb_s"])
    found["ratio_file_server"] = found["blob_ours_mb_s"] / best
    found["ratio_raw_read"] = found["blob_ours_mb_s"] / found["blob_raw_mb_s"]
    return found


def requests_per_second(call: Callable[[httpx.Client], httpx.Response], seconds: float = 5.0) -> float:
    """Answers a second on connections kept open."""
    deadline = time.perf_counter() + seconds
    counts = [0] * CONNECTIONS

    def work(number: int) -> None:
        with httpx.Client(trust_env=False) as client:
            while time.perf_counter() < deadline:
                call(client).raise_for_status()
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def submit(server: Process, folder: Path, sequences: int, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Upload random sequences and ask for them; return the body that was posted and the view of the complete cache."""
    path = folder / f"{sequences}.parquet"
    random = np.random.default_rng(sequences)
    write_dataset(path, (Example(input_ids=random.integers(0, VOCAB_SIZE, 4)) for _ in range(sequences)))
    digest = digest_file(path)
    httpx.put(f"{server.url}/v1/blobs/{digest}", content=path.read_bytes(), trust_env=False, timeout=120)
    body = {"teacher": "tiny", "data": digest, "k": 4, "tail_samples": 0, **settings}
    view = httpx.post(f"{server.url}/v1/requests", json=body, trust_env=False).raise_for_status().json()
    while view["state"] not in ("complete", "failed"):
        time.sleep(0.5)
        view = httpx.get(f"{server.url}/v1/requests/{view['id']}", trust_env=False).raise_for_status().json()
    assert view["state"] == "complete", view["error"]
    return body, view


def fetch_all(server: Process, request: str) -> int:
    """Fetch the manifest and every shard, and return how many there are."""
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        manifest = Manifest.from_bytes(client.get(f"/v1/requests/{request}/manifest").raise_for_status().content)
        for shard in manifest.shards:
            assert len(client.get(f"/v1/blobs/{shard.digest}").raise_for_status().content) == shard.bytes
    return len(manifest.shards)


def measure(blob_mb: int, clients: int, shards: int, folder: Path) -> dict[str, Any]:
    """Every figure, of one server."""
    data_dir = folder / "data"
    teacher = make_teacher(folder / "teacher")
    command = [sys.executable, "-m", "teachercache", "serve", "--port", "0", "--data-dir", str(data_dir)]
    server = Process([*command, "--teacher", f"tiny={teacher}", "--free-space-reserve", "0"])
    blob = folder / "blob"
    blob.write_bytes(b"PAR1" + os.urandom(blob_mb * 2**20) + b"PAR1")
    try:
        body, view = submit(server, folder, 10, shard_positions=1)
        assert fetch_all(server, view["id"]) == 10
        figures: dict[str, Any] = {"rss_mb_10_shards": server.rss_mb()}
        begin = time.perf_counter()
        _, many = submit(server, folder, shards, shard_positions=1)
        figures["shards_per_s"] = shards / (time.perf_counter() - begin)
        assert fetch_all(server, many["id"]) == shards
        figures[f"rss_mb_{shards}_shards"] = server.rss_mb()
        figures["rss_growth"] = figures[f"rss_mb_{shards}_shards"] / figures["rss_mb_10_shards"] - 1
        status = f"{server.url}/v1/requests/{view['id']}"
        figures["status_rps"] = requests_per_second(lambda client: client.get(status))
        figures["dedupe_rps"] = requests_per_second(lambda client: client.post(f"{server.url}/v1/requests", json=body))
        figures |= blobs(server, data_dir, blob, clients)
        figures["rss_mb_end"] = server.rss_mb()
    finally:
        server.end()
    return {"clients": clients, "blob_mb": blob_mb, **figures}


if __name__ == "__main__":
    parser = arguments("What the server's HTTP costs; see the module.")
    parser.add_argument("--blob-mb", type=int, default=128)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--shards", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(args.blob_mb, args.clients, args.shards, Path(scratch))
    finish("service", figures, ["fastapi", "starlette", "uvicorn", "httpx"], args)
