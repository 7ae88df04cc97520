"""docker-compose.yml and the Dockerfile: their commands and their health check, run here without Docker."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tiny_server import TinyServer, tiny_teacher

from teachercache.service.settings import PREFIX, Settings

__all__ = ["tiny_teacher"]

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return found


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets."""
    block = re.search(r"^ENV ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    assert block is not None
    return dict(pair.split("=", 1) for pair in block[1].replace("\\\n", " ").split())


def instruction(name: str) -> list[str]:
    """The JSON list that follows an instruction, of the health check the one after its CMD."""
    before = r"^HEALTHCHECK .*\\\n\s+CMD " if name == "HEALTHCHECK" else rf"^{name} "
    found = re.search(before + r"(\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    values: list[str] = json.loads(found[1])
    return values


def test_every_variable_is_a_setting(service: dict[str, Any]) -> None:
    given = {**image_environment(), **service["services"]["server"]["environment"]}
    names = {name for name in given if name.startswith(PREFIX)}
    assert names and names <= {PREFIX + name.upper() for name in Settings.model_fields}


def test_the_drain_ends_before_docker_kills(service: dict[str, Any]) -> None:
    server = service["services"]["server"]
    assert float(server["environment"]["TEACHERCACHE_DRAIN_SECONDS"]) < float(server["stop_grace_period"].rstrip("s"))


def test_it_is_no_root_and_has_limits(service: dict[str, Any]) -> None:
    server = service["services"]["server"]
    assert re.search(r"^USER teachercache$", DOCKERFILE, re.MULTILINE) and "VOLUME /data" in DOCKERFILE
    assert server["cap_drop"] == ["ALL"] and "no-new-privileges:true" in server["security_opt"]
    assert server["mem_limit"] and server["pids_limit"] and server["volumes"][1].endswith(":ro")


def test_the_command_serves_and_the_health_check_sees_it(
    service: dict[str, Any], tmp_path: Path, tiny_teacher: Path
) -> None:
    """As in the image, but for the engine, which needs a GPU, and the paths and the port, which are a container's."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32) + "\n")
    command = service["services"]["server"]["command"]
    assert instruction("ENTRYPOINT") == ["teachercache"] and [command[0]] == instruction("CMD")
    places = {"teacher=/teacher": f"teacher={tiny_teacher}", "/run/secrets/teachercache_token": str(token)}
    arguments = [places.get(argument, argument) for argument in command[1:]]
    assert set(places) <= set(command)
    environment = {**image_environment(), **service["services"]["server"]["environment"]}
    environment |= {"TEACHERCACHE_DATA_DIR": "unused", "TEACHERCACHE_ENGINE": "transformers"}
    for _ in range(2):
        # the second time the token is there
        with TinyServer(tmp_path / "data", *arguments, **environment) as server:
            assert httpx.get(f"{server.url}/v1/requests", trust_env=False).status_code == 401
            headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
            assert server.http.get("/v1/whoami", headers=headers).json()["scopes"] == ["admin"]
            assert server.http.get("/v1/teachers", headers=headers).json()["items"][0]["name"] == "teacher"
            check = [
                part.replace("127.0.0.1:8765", server.url.split("//")[1]) for part in instruction("HEALTHCHECK")[1:]
            ]
            assert check[0] == "-c"
            done = subprocess.run([sys.executable, *check], env=os.environ | {"no_proxy": "*"}, check=False)
            assert done.returncode == 0
    failed = subprocess.run([sys.executable, *check], env=os.environ | {"no_proxy": "*"}, stderr=-3, check=False)
    assert failed.returncode != 0


@pytest.mark.parametrize("text", ["", "short", "x" * 40 + " y", "\u00e9" * 40])
def test_a_first_token_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    token = tmp_path / "token"
    token.write_text(text)
    command = [sys.executable, "-m", "teachercache", "serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run([*command, "--first-token-file", str(token)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "openssl rand -hex 32" in done.stderr


def test_docker_reads_it(tmp_path: Path) -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], check=False).returncode:
        pytest.skip("there is no docker compose here")
    environment = os.environ | {"TEACHER": str(tmp_path)}
    command = ["docker", "compose", "-f", str(ROOT / "docker-compose.yml"), "config", "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
