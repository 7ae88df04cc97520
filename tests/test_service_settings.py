"""Settings, the data directory and its lock: each mistake is one clear error before anything is served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from teachercache.format_spec import Code
from teachercache.service.data_dir import DataDir, ServerLock, file_system
from teachercache.service.errors import AlreadyServed, InvalidSettings, PortInUse
from teachercache.service.server import listen, url_of
from teachercache.service.settings import Settings, is_loopback, load_settings, parse_teachers


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take our variables away."""
    for name in list(os.environ):
        if name.startswith("TEACHERCACHE_"):
            monkeypatch.delenv(name)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    settings = load_settings()
    assert settings.data_dir == tmp_path / "teachercache"
    assert (settings.host, settings.engine, settings.teachers) == ("127.0.0.1", "transformers", {})
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings().data_dir == tmp_path / ".local" / "share" / "teachercache"


def test_the_command_line_overrules_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERCACHE_PORT", "1234")
    monkeypatch.setenv("TEACHERCACHE_TEACHERS", "big=/models/a=b, small=org/small")
    assert load_settings().port == 1234
    assert load_settings().teachers == {"big": "/models/a=b", "small": "org/small"}
    assert load_settings(port=5, teachers={"x": "/y"}, engine=None).model_dump(
        include={"port", "teachers", "engine"}
    ) == {
        "port": 5,
        "teachers": {"x": "/y"},
        "engine": "transformers",
    }


def test_an_unknown_variable_is_an_error_and_the_client_s_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "TOKEN", "CACHE_DIR", "OFFLINE"):
        monkeypatch.setenv(f"TEACHERCACHE_{name}", "x")
    load_settings()
    monkeypatch.setenv("TEACHERCACHE_PROT", "1")
    with pytest.raises(InvalidSettings, match="TEACHERCACHE_PROT"):
        load_settings()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "example.org"}, "not an address of this machine"),
        ({"host": ""}, "not an address of this machine"),
        ({"port": 70000}, "port"),
        ({"port": "many"}, "port"),
        ({"upload_limit": 0}, "upload_limit"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"teachers": {"a b": "/x"}}, "'a b' cannot name a teacher"),
        ({"teachers": {"sha256:" + "0" * 64: "/x"}}, "cannot name a teacher"),
        ({"teachers": {"0" * 64: "/x"}}, "cannot name a teacher"),
    ],
)
def test_a_bad_value_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words) as failure:
        load_settings(**given)
    assert failure.value.code is Code.INVALID_CONFIG and len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_is_told_from_the_rest(host: str) -> None:
    assert Settings(host=host).host in (host, "127.0.0.1") and is_loopback(Settings(host=host).host)
    assert not any(is_loopback(Settings(host=other).host) for other in ("0.0.0.0", "::", "192.168.1.5"))


@pytest.mark.parametrize("pairs", [["x"], ["=x"], ["x="], ["x=1", "x=2"]])
def test_teachers_are_pairs(pairs: list[str]) -> None:
    with pytest.raises(ValueError, match=r"NAME=PATH|given twice"):
        parse_teachers(pairs)


def test_a_data_directory_has_one_server(tmp_path: Path) -> None:
    root = DataDir(tmp_path / "data").root
    with ServerLock(root), pytest.raises(AlreadyServed, match=f"process {os.getpid()}$"):
        ServerLock(root)
    with ServerLock(root):
        pass
    # the lock goes with its process, however that ends
    script = f"""
import os, signal
from pathlib import Path
from teachercache.service.data_dir import ServerLock
lock = ServerLock(Path({str(root)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with ServerLock(root):
        pass


def test_a_data_directory_of_a_newer_layout_is_refused(tmp_path: Path) -> None:
    DataDir(tmp_path)
    (tmp_path / "LAYOUT").write_text('{"layout": 2}')
    with pytest.raises(InvalidSettings, match="layout 2"):
        DataDir(tmp_path)
    (tmp_path / "LAYOUT").write_text("")
    with pytest.raises(InvalidSettings, match="not readable"):
        DataDir(tmp_path)


def test_a_data_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSettings, match="cannot be used"):
        DataDir(tmp_path / "file" / "data")


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(tmp_path) not in ("unknown", "")
    monkeypatch.setattr("teachercache.service.data_dir.file_system", lambda path: "nfs4")
    with pytest.raises(InvalidSettings, match="nfs4"):
        DataDir(tmp_path / "data")


def test_a_port_in_use_is_said_so() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use") as failure:
            listen("127.0.0.1", port)
    assert failure.value.code is Code.PORT_IN_USE
    with listen("127.0.0.1", port):
        pass
