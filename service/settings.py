"""How a server is run: from the environment (`TEACHERCACHE_...`), overruled by the command line."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ..format_spec import is_digest, is_request_id
from .engine_choice import HEAD_DTYPE, EngineChoice
from .errors import InvalidSettings

PREFIX = "TEACHERCACHE_"
CLIENT_VARIABLES = {"TEACHERCACHE_URL", "TEACHERCACHE_TOKEN", "TEACHERCACHE_CACHE_DIR", "TEACHERCACHE_OFFLINE"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def default_data_dir() -> Path:
    """Return the folder for data in the user's home: $XDG_DATA_HOME/teachercache or ~/.local/share/teachercache."""
    root = os.environ.get("XDG_DATA_HOME", "")
    # the XDG specification has relative paths ignored
    return (Path(root) if os.path.isabs(root) else Path.home() / ".local" / "share") / "teachercache"


class Settings(BaseSettings):
    """All settings of a server; sizes in bytes, times in seconds.

    `teachers` maps names to local folders or hub ids; in the environment it is `NAME=PATH,NAME=PATH`, and `engine_args`
    a JSON object.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    data_dir: Path = Field(default_factory=default_data_dir)
    host: str = "127.0.0.1"
    port: int = Field(default=8765, ge=0, le=65535)
    teachers: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    engine: str = "transformers"
    dtype: str = "auto"
    head_dtype: str = HEAD_DTYPE
    capture_path: str = "auto"
    engine_args: dict[str, Any] = Field(default_factory=dict)
    anonymous_read: bool = False
    first_token_file: Path | None = None
    replicas: int = Field(default=1, ge=1, le=64)
    upload_limit: int = Field(default=16 * 2**30, ge=1)
    body_seconds: float = Field(default=60.0, gt=0)
    free_space_reserve: int = Field(default=1 * 2**30, ge=0)
    idle_seconds: float = Field(default=300.0, ge=0)
    lease_seconds: float = Field(default=300.0, gt=0)
    drain_seconds: float = Field(default=10.0, gt=0)

    @property
    def choice(self) -> EngineChoice:
        """The engine and its settings; raises InvalidSettings."""
        return EngineChoice(self.engine, self.dtype, self.head_dtype, self.capture_path, self.engine_args)

    @field_validator("teachers", mode="before")
    @classmethod
    def _parse_teachers(cls, value: Any) -> Any:
        return parse_teachers(value.split(",")) if isinstance(value, str) else value

    @field_validator("teachers")
    @classmethod
    def _check_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _NAME.fullmatch(name) or is_digest(name) or is_request_id(name):
                raise ValueError(
                    f"{name!r} cannot name a teacher: letters, digits, '.', '_', '/' and '-', and no digest or id"
                )
        return value

    @field_validator("data_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("host")
    @classmethod
    def _check_host(cls, value: str) -> str:
        if value == "localhost":
            return "127.0.0.1"
        try:
            ipaddress.ip_address(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not an address of this machine, like 127.0.0.1, 0.0.0.0 or ::") from error
        return value


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    return ipaddress.ip_address(host).is_loopback


def parse_teachers(pairs: list[str]) -> dict[str, str]:
    """Return {name: path} of `NAME=PATH` pairs."""
    teachers: dict[str, str] = {}
    for pair in pairs:
        name, equals, path = pair.strip().partition("=")
        if not (name and equals and path):
            raise ValueError(f"a teacher is given as NAME=PATH, not {pair!r}")
        if name in teachers:
            raise ValueError(f"teacher {name!r} is given twice")
        teachers[name] = path
    return teachers


def load_settings(**given: Any) -> Settings:
    """Return the settings of the environment, overruled by what is given and not None.

    Raises:
        InvalidSettings: a value is not allowed, or an environment variable with our prefix is unknown.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields} | CLIENT_VARIABLES
    if unknown := sorted(name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known):
        raise InvalidSettings(f"unknown environment variables {unknown}; known: {sorted(known)}")
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidSettings(f"{name}: {first['msg'].removeprefix('Value error, ')}") from error
