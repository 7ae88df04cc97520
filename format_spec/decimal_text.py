"""Numbers that are no integers, as text: requests are hashed, and a float has no one way to be written."""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import RequestError

_DECIMAL = re.compile(r"(0|[1-9][0-9]{0,3})(?:\.([0-9]{1,32}))?")


def canonical_decimal(name: str, value: object, wanted: str, example: str) -> str:
    """Return the one text of a decimal from 0 to below 10,000: without sign, exponent, and zeros that do not count.

    Text has at most 32 digits after the point; a number stands for the shortest text that float64 reads as it.

    Raises:
        RequestError: it is none; the message calls it `name`, which must be `wanted`, written like `example`.
    """
    text = value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 10_000:
        text = format(Decimal(repr(float(value))), "f")
    match = _DECIMAL.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise RequestError(
            f"{name} must be a decimal {wanted}, written like {example}, with at most 32 digits, not {value!r}"
        )
    digits = (match[2] or "").rstrip("0")
    return f"{match[1]}.{digits}" if digits else match[1]
