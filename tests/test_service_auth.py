"""Tokens: who gets in, who does not, and what each is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from tiny_server import TinyServer, problem, random_examples, tiny_teacher, write_examples

from teachercache.cli import main
from teachercache.client import Client
from teachercache.service.errors import InvalidSettings
from teachercache.service.sqlite_meta import SqliteMeta
from teachercache.service.tokens import Token, hash_of, make_token

__all__ = ["tiny_teacher"]


@pytest.fixture
def server(tiny_teacher: Path, tmp_path: Path) -> Iterator[TinyServer]:
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}") as server:
        yield server


def make(data_dir: Path, owner: str, *scopes: str, **changes: object) -> str:
    """Record a token, as the command line does; return it."""
    token, text = make_token(owner, list(scopes), None)
    fields = {name: getattr(token, name) for name in token.__dataclass_fields__}
    SqliteMeta(data_dir / "meta.db").add_token(Token(**(fields | changes)), hash_of(text))  # type: ignore[arg-type]
    return text


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_the_first_token_closes_an_open_server(server: TinyServer) -> None:
    assert server.http.get("/v1/requests").status_code == 200
    assert server.http.get("/v1/whoami").json() == {
        "owner": "anonymous",
        "scopes": ["read", "submit", "admin"],
        "expires_at": None,
    }
    reader = make(server.data_dir, "ada", "read")
    answer = server.http.get("/v1/requests")
    assert answer.status_code == 401 and problem(answer)["code"] == "unauthenticated"
    assert answer.headers["www-authenticate"].startswith("Bearer") and "TEACHERCACHE_TOKEN" in problem(answer)["detail"]
    assert server.http.get("/v1/requests", headers=bearer(reader)).status_code == 200
    assert server.http.get("/v1/whoami", headers=bearer(reader)).json()["owner"] == "ada"
    for path in ("/healthz", "/readyz", "/v1/version"):
        assert server.http.get(path).status_code == 200
    for path in ("/metrics", "/openapi.json", "/v1/teachers", "/nowhere"):
        assert server.http.get(path).status_code == 401


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer tc_1_x", "Basic YTpi", "Bearer \u00e9", "tc_1_x", "Bearer " + "x" * 6000],
)
def test_what_opens_nothing_is_told_before_the_body_is_read(server: TinyServer, header: str) -> None:
    make(server.data_dir, "ada", "read")

    def endless() -> Iterator[bytes]:
        yield b"PAR1"
        raise AssertionError("the body was read")

    answer = server.http.put(
        "/v1/blobs/sha256:" + "0" * 64,
        content=b"PAR1" * 1000,
        headers={"Authorization": header.encode("latin-1", "replace")},
    )
    assert answer.status_code == 401, answer.text
    with pytest.raises((httpx.HTTPError, AssertionError)):
        server.http.put("/v1/blobs/sha256:" + "0" * 64, content=endless()).raise_for_status()
    assert list((server.data_dir / "staging").iterdir()) == []


def test_a_token_opens_what_its_scopes_say(server: TinyServer, tmp_path: Path) -> None:
    reader, writer = make(server.data_dir, "ada", "read"), make(server.data_dir, "bob", "submit")
    admin = make(server.data_dir, "eve", "admin")
    body = {"teacher": "tiny", "data": "sha256:" + "0" * 64}
    answer = server.http.post("/v1/requests", json=body, headers=bearer(reader))
    assert answer.status_code == 403 and problem(answer)["code"] == "forbidden"
    assert "'submit'" in problem(answer)["detail"] and "ada" in problem(answer)["detail"]
    assert server.http.get("/v1/requests", headers=bearer(writer)).status_code == 403
    for token in (writer, admin):
        assert server.http.post("/v1/requests", json=body, headers=bearer(token)).status_code == 404
    assert server.http.get("/v1/requests", headers=bearer(admin)).status_code == 200
    lines = [json.loads(line.split("audit: ")[1]) for line in server.log_text().splitlines() if "audit: " in line]
    assert [(line["owner"], line["status"]) for line in lines] == [("ada", 403), ("bob", 404), ("eve", 404)]
    assert all(reader not in line and writer not in line for line in server.log_text().splitlines())


def test_expired_and_revoked_tokens_open_nothing(server: TinyServer) -> None:
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat(timespec="seconds")
    expired = make(server.data_dir, "ada", "read", expires_at=past)
    revoked = make(server.data_dir, "bob", "read")
    assert server.http.get("/v1/requests", headers=bearer(revoked)).status_code == 200
    meta = SqliteMeta(server.data_dir / "meta.db")
    meta.revoke_token(next(token.id for token in meta.tokens() if token.owner == "bob"))
    for token in (expired, revoked):
        answer = server.http.get("/v1/requests", headers=bearer(token))
        assert answer.status_code == 401 and "expired or was revoked" in problem(answer)["detail"]


def test_two_owners_share_one_run(server: TinyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the client, whose token comes from the environment."""
    data = write_examples(tmp_path / "data.parquet", random_examples(6))
    ids, views = set(), []
    for owner in ("ada", "bob", "ada"):
        monkeypatch.setenv("TEACHERCACHE_TOKEN", make(server.data_dir, owner, "read", "submit"))
        with Client(server.url, cache_dir=tmp_path / "cache") as client:
            view = client.submit(teacher="tiny", data=client.upload(data), k=4)
            ids.add(view.id)
            views.append(client.wait(view.id, timeout_s=60))
    assert len(ids) == 1 and sorted(views[-1].owners) == ["ada", "bob"]
    assert views[-1].teacher_tokens_scored == views[0].teacher_tokens_scored


def test_reading_may_be_left_open(tiny_teacher: Path, tmp_path: Path) -> None:
    with TinyServer(tmp_path / "data", "--teacher", f"tiny={tiny_teacher}", "--anonymous-read") as server:
        make(server.data_dir, "ada", "submit")
        assert server.http.get("/v1/requests").status_code == 200
        answer = server.http.post("/v1/requests", json={})
        assert answer.status_code == 401 and "lets nobody submit" in problem(answer)["detail"]


def test_tokens_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(tmp_path / "data")]
    assert main(["token", "create", "--owner", "ada", "--days", "30", *where]) == 0
    text = capsys.readouterr().out.strip()
    identity = text.split("_")[1]
    assert main(["token", "list", *where]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith(f"{identity}  valid    ada  read,submit") and text not in listed
    assert text.encode() not in (tmp_path / "data" / "meta.db").read_bytes()
    assert main(["token", "revoke", identity, *where]) == 0
    assert main(["token", "list", *where]) == 0
    assert "revoked  ada" in capsys.readouterr().out
    assert main(["token", "revoke", "nothing", *where]) == 3
    assert main(["token", "create", "--owner", "ada", "--scope", "root", *where]) == 2
    assert "known: ['read', 'submit', 'admin']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("owner", "scopes", "days"),
    [("", ["read"], None), ("a\nb", ["read"], None), ("anonymous", ["read"], None), ("x" * 65, [], 1), ("a", [], 0)],
)
def test_tokens_that_cannot_be(owner: str, scopes: list[str], days: float | None) -> None:
    with pytest.raises(InvalidSettings):
        make_token(owner, scopes, days)


def test_off_loopback_only_with_tokens(tiny_teacher: Path, tmp_path: Path) -> None:
    make_first = ["token", "create", "--owner", "ada", "--data-dir", str(tmp_path / "data")]
    assert main(make_first) == 0
    arguments = ["--teacher", f"tiny={tiny_teacher}", "--host", "0.0.0.0"]
    with TinyServer(tmp_path / "data", *arguments) as server:
        assert server.http.get("/v1/requests").status_code == 401
        assert server.http.get("/healthz").status_code == 200
