"""Bytes are the same whether they are read at once or in a thread."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from teachercache.service import cached_file
from teachercache.service.cached_file import PROBE_BYTES, CachedFile, in_memory


@pytest.mark.parametrize("way", ["memory", "thread"])
def test_a_file_is_read_in_parts_and_from_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    data = os.urandom(3 * PROBE_BYTES + 17)
    path = tmp_path / "file"
    path.write_bytes(data)
    monkeypatch.setattr(cached_file, "in_memory", lambda *what: way == "memory")

    async def read(begin: int, size: int) -> list[bytes]:
        parts = []
        async with CachedFile(path) as file:
            await file.seek(begin)
            while part := await file.read(size):
                parts.append(part)
        return parts

    for begin, size in ((0, PROBE_BYTES), (5, 1000), (len(data) - 3, PROBE_BYTES), (len(data), 10)):
        parts = anyio.run(read, begin, size)
        assert b"".join(parts) == data[begin:]
        assert all(len(part) == size for part in parts[:-1])


def test_what_cannot_be_told_is_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * PROBE_BYTES)
    with path.open("rb") as file:
        monkeypatch.setattr(cached_file, "_NOWAIT", None)
        assert in_memory(file.fileno(), 0, PROBE_BYTES) is False

    def refuse(*args: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(cached_file, "_NOWAIT", 8)
    monkeypatch.setattr(os, "preadv", refuse)
    assert in_memory(0, 0, 10) is False
