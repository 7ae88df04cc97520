"""The folder that a server keeps everything in, and the lock that makes it one server's own.

LAYOUT                    {"layout": 1}
server.lock               held by the server that runs, with its pid inside
meta.db                   what is asked for and how far it is
blobs/sha256/ab/<hex>     everything that is content-addressed, read-only
staging/                  files being written; swept at start
quarantine/               blobs found damaged
logs/worker.log          of the first replica; worker-1.log is the second one's
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from .errors import AlreadyServed, InvalidSettings

LAYOUT = 1
# statfs has no portable name for these; the kernel's table of mounts has
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse.sshfs"}


class DataDir:
    """Paths inside a data directory.

    Raises:
        InvalidSettings: it cannot be made, lies on a network file system, or has a layout that is not known.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "meta.db"
        self.worker_log = root / "logs" / "worker.log"
        try:
            for folder in (root, self.worker_log.parent):
                folder.mkdir(parents=True, exist_ok=True)
            self._check_layout()
        except OSError as error:
            raise InvalidSettings(f"data_dir {root} cannot be used: {error.strerror}") from error
        kind = file_system(root)
        if kind in NETWORK_FILE_SYSTEMS:
            raise InvalidSettings(f"data_dir {root} is on {kind}; the database needs a local file system")

    def _check_layout(self) -> None:
        path = self.root / "LAYOUT"
        try:
            layout = json.loads(path.read_text())["layout"]
        except FileNotFoundError:
            # renamed into place, so that a crash leaves no empty file
            draft = path.with_name("LAYOUT.new")
            draft.write_text(json.dumps({"layout": LAYOUT}) + "\n")
            draft.replace(path)
            return
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidSettings(f"{path} is not readable: {error}") from error
        if layout != LAYOUT:
            raise InvalidSettings(f"data_dir {self.root} has layout {layout}, this version knows {LAYOUT}")


class ServerLock:
    """Held while a server runs; released by the kernel however the server ends.

    Raises:
        AlreadyServed: names the process that holds it.
    """

    def __init__(self, root: Path) -> None:
        path = root / "server.lock"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise AlreadyServed(f"data_dir {root} is already served by process {pid}") from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> ServerLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, "unknown" where the kernel has no table of mounts."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    best, kind, resolved = -1, "unknown", path.resolve()
    for line in mounts:
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind
