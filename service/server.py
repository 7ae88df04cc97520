"""A server process: one data directory, one socket, one app."""

from __future__ import annotations

import errno
import json
import logging
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from .app import create_app
from .data_dir import DataDir, ServerLock
from .devices import environments
from .errors import InvalidSettings, PortInUse
from .settings import Settings, is_loopback
from .sqlite_meta import SqliteMeta
from .state import State
from .store import LocalStore
from .supervisor import Supervisor
from .teachers import Teachers
from .tokens import MIN_SECRET, hash_of, make_token

_log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn that says where it listens, and that has the worker drained as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, supervisor: Supervisor, url: str) -> None:
        super().__init__(config)
        self._supervisor = supervisor
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and print the one line that scripts wait for."""
        await super().startup(sockets=sockets)
        if self.started:
            print(f"listening on {self._url}", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after the drain; a second signal ends at once. Unlike uvicorn, do not die of the signal."""
        self._supervisor.drain()
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


def serve(settings: Settings) -> None:
    """Serve until a signal.

    Raises:
        InvalidSettings, AlreadyServed, PortInUse, UnknownTeacher, UnsupportedTeacher: before anything is served.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    data_dir = DataDir(settings.data_dir)
    with ServerLock(data_dir.root), listen(settings.host, settings.port) as listener:
        store = LocalStore(data_dir.root, settings.free_space_reserve)
        if swept := store.sweep():
            _log.info("removed %d unfinished files", swept)
        meta = SqliteMeta(data_dir.database)
        if settings.first_token_file is not None:
            _add_first_token(settings.first_token_file, meta)
        _check_open(settings, meta)
        teachers = Teachers.of(settings, meta.file_digest)
        for teacher in teachers.all:
            _log.info("teacher %s: %s in %s", teacher.name, teacher.digest, teacher.path)
        parts = environments(settings.replicas, settings.choice.gpus)
        supervisor = Supervisor(worker_command(settings, teachers), data_dir.worker_log, meta, parts)
        app = create_app(State(settings, store, meta, teachers, supervisor))
        drain = max(1, round(settings.drain_seconds))
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=drain)
        Server(config, supervisor, url_of(listener)).run(sockets=[listener])


def _add_first_token(path: Path, meta: SqliteMeta) -> None:
    """Let a secret in a file open everything: how a server that nobody can log in to gets its first token."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"first_token_file {path} cannot be read: {error}") from error
    if len(text) < MIN_SECRET or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidSettings(
            f"first_token_file {path} must hold {MIN_SECRET} ASCII characters or more, without spaces, such as: "
            "openssl rand -hex 32"
        )
    if meta.find_token(hash_of(text)) is None:
        token, _ = make_token("first", ["admin"], None)
        meta.add_token(token, hash_of(text))


def _check_open(settings: Settings, meta: SqliteMeta) -> None:
    if not is_loopback(settings.host) and not meta.has_tokens():
        raise InvalidSettings(
            f"{settings.host} can be reached from other machines, and there is no token yet: make one with "
            f"teachercache token create --data-dir {settings.data_dir} --owner NAME, or listen on 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 takes a free one.

    Raises:
        PortInUse: another program listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is spelled out: 40 ms an answer
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # bound alone, another program could still take the port
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} of {host} is in use; choose another with --port, 0 takes a free one"
            ) from error
        raise InvalidSettings(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def worker_command(settings: Settings, teachers: Teachers) -> list[str]:
    """Return the command line of this server's worker."""
    package = __name__.partition(".")[0]
    command = [sys.executable, "-m", package, "worker", "--supervised"]
    engine = ("engine", "dtype", "head_dtype", "capture_path")
    for name in ("data_dir", *engine, "free_space_reserve", "idle_seconds", "lease_seconds"):
        command += ["--" + name.replace("_", "-"), str(getattr(settings, name))]
    for name, value in settings.engine_args.items():
        command += ["--engine-arg", f"{name}={json.dumps(value)}"]
    for teacher in teachers.all:
        command += ["--teacher", f"{teacher.name}={teacher.path}"]
    return command
