"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def teacher_dir() -> Path:
    """The real small teacher, made once in the user's cache."""
    from teachercache.demo.model import ensure_model

    return ensure_model()
