"""Who produced the numbers: everything that would change a row if it changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from .canonical import canonical_json
from .digest import digest_bytes, is_digest
from .errors import ManifestError


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The teacher, its engine and their numeric settings.

    `teacher` is the digest of config, weights, tokenizer and template together; `tokenizer` of the
    tokenizer's files alone, which a student must share. `software` lists the versions that compute.
    """

    teacher: str
    tokenizer: str
    vocab_size: int
    engine: str
    dtype: str
    head_dtype: str
    device: str
    kernel: str
    software: dict[str, str]

    def __post_init__(self) -> None:
        for name in ("teacher", "tokenizer"):
            if not is_digest(getattr(self, name)):
                raise ManifestError(f"fingerprint: {name} is not a digest: {getattr(self, name)!r}")
        texts = [self.engine, self.dtype, self.head_dtype, self.device, self.kernel]
        texts += self.software.values() if isinstance(self.software, dict) else [self.software]
        if not isinstance(self.software, dict) or not all(isinstance(text, str) for text in texts):
            raise ManifestError(f"fingerprint: not all of {texts} are texts")
        if not isinstance(self.vocab_size, int) or self.vocab_size < 1:
            raise ManifestError(f"fingerprint: vocab_size {self.vocab_size!r} is not a positive integer")

    @property
    def digest(self) -> str:
        """Identity of the fingerprint: the digest of its canonical JSON."""
        return digest_bytes(canonical_json(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the fingerprint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Fingerprint:
        """Read a fingerprint, refusing unknown and missing fields."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ManifestError(f"fingerprint: expected an object with exactly the keys {sorted(names)}")
        return cls(**value)
