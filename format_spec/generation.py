"""How a teacher continues prompts, where a request asks for data of the teacher's own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from .decimal_text import canonical_decimal
from .errors import RequestError

MAX_GENERATED_TOKENS = 2**20
MAX_TEMPERATURE = 100


@dataclass(frozen=True, slots=True)
class Generation:
    """At most `max_tokens` tokens after each prompt, drawn at `temperature` from the most probable `top_p`.

    Temperature 0 takes the most probable token always; 1 and `top_p` 1 draw from the teacher's own distribution.
    Numbers become canonical text here. A completion ends with the teacher's end-of-sequence token, if it comes.

    Raises:
        RequestError: a value outside its range.
    """

    max_tokens: int
    temperature: str | float = "1"
    top_p: str | float = "1"

    def __post_init__(self) -> None:
        count = self.max_tokens
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_GENERATED_TOKENS:
            raise RequestError(
                f"generate's max_tokens must be an integer from 1 to {MAX_GENERATED_TOKENS}, not {count!r}"
            )
        for name, low, high in (("temperature", "from 0", MAX_TEMPERATURE), ("top_p", "above 0", 1)):
            value, wanted = getattr(self, name), f"{low} to {high}"
            text = canonical_decimal(f"generate's {name}", value, wanted, "0.7")
            if Decimal(text) > high or (name == "top_p" and text == "0"):
                raise RequestError(f"generate's {name} must be a decimal {wanted}, not {value!r}")
            object.__setattr__(self, name, text)

    @classmethod
    def of(cls, value: Any) -> Generation | None:
        """Return what a posted or stored value says: an object, or null for no generation."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise RequestError(f"generate must be null or an object with max_tokens, not {type(value).__name__}")
        known = {"max_tokens", "temperature", "top_p"}
        if unknown := set(value) - known:
            raise RequestError(f"generate has unknown keys {sorted(unknown)}; known: {sorted(known)}")
        if "max_tokens" not in value:
            raise RequestError("generate lacks max_tokens, the most tokens of a completion")
        return cls(**value)

    def room(self, num_tokens: int, max_length: int) -> int:
        """Return the most tokens of a completion of so many prompt tokens, in sequences of at most `max_length`."""
        return min(self.max_tokens, max_length - num_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)
