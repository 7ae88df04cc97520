"""What `teachercache.client` offers, and what it must not drag in."""

from __future__ import annotations

import subprocess
import sys

from teachercache import client
from teachercache.format_spec import TeachercacheError


def test_public_names_are_these() -> None:
    assert client.__all__ == [
        "BadAnswer",
        "CacheIncomplete",
        "CacheNotFound",
        "CacheUnusable",
        "Client",
        "ClientError",
        "ConfigError",
        "ConnectionFailed",
        "Estimate",
        "IntegrityError",
        "OfflineMiss",
        "RequestFailed",
        "RequestView",
        "Sequences",
        "ServerError",
        "Teacher",
        "TopkBatch",
        "TopkStream",
        "WaitTimeout",
        "collate",
        "stream_topk",
    ]
    assert all(hasattr(client, name) for name in client.__all__)


def test_errors_share_one_base_and_are_drawn() -> None:
    from teachercache.client import errors

    made = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.ClientError)
    ]
    assert issubclass(errors.ClientError, TeachercacheError)
    assert errors.__doc__ is not None
    assert all(f" {error.__name__}" in errors.__doc__ for error in made)


def test_import_stays_light() -> None:
    """Neither the trainer's nor the service's libraries come in, nor what only some verbs need."""
    heavy = ("torch", "transformers", "fastapi", "pydantic", "uvicorn", "pyarrow")
    code = f"import sys, teachercache.client.commands; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
