"""Canonical JSON (RFC 8785) for the values we allow: no floats, ASCII keys, integers below 2^53."""

from __future__ import annotations

import json
from typing import Any

from .errors import FormatError

MAX_INT = 2**53 - 1
MAX_DEPTH = 64


def canonical_json(value: Any) -> bytes:
    """Return the one byte string that stands for `value`.

    Raises:
        FormatError: a float, a key that is not ASCII text, an integer of 2^53 or more, a lone surrogate, or more than
            64 arrays and objects inside one another.
    """
    _check(value, "$", 0)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"canonical JSON holds text that is not Unicode: {error}") from error


def parse_canonical(data: bytes) -> Any:
    """Return the value of canonical JSON, refusing bytes that are not in canonical form.

    Raises:
        FormatError: not JSON, or not the canonical form of what it says.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from error
    if canonical_json(value) != data:
        raise FormatError("JSON is not in canonical form (RFC 8785)")
    return value


def _check(value: Any, path: str, depth: int) -> None:
    if depth >= MAX_DEPTH and isinstance(value, list | tuple | dict):
        raise FormatError(f"more than {MAX_DEPTH} arrays and objects stand inside one another")
    if value is None or isinstance(value, bool | str):
        return
    if isinstance(value, int):
        if abs(value) > MAX_INT:
            raise FormatError(f"integer {value} at {path} is above 2^53 - 1; write it as a string")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check(item, f"{path}[{i}]", depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not key.isascii():
                raise FormatError(f"key {key!r} at {path} is not ASCII text")
            _check(item, f"{path}.{key}", depth + 1)
    else:
        raise FormatError(f"{type(value).__name__} at {path} has no canonical form; write it as a string")
