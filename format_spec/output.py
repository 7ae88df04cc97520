"""What commands print on standard output: fields for people, JSON for scripts."""

from __future__ import annotations

import json
from typing import Any


def print_fields(fields: dict[str, Any], as_json: bool) -> None:
    """Print one field a line, or all as one JSON object."""
    if as_json:
        print_json(fields)
        return
    width = max(map(len, fields))
    for name, value in fields.items():
        print(f"{name:{width}}  {value}")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def size_text(num_bytes: float) -> str:
    """Return a size with the unit that reads best."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
