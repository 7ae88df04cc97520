"""The cache request: what a client asks for, what the service makes of it, and its identity.

A `Submission` may leave things to the service (a teacher's name, `auto`). Resolved, it becomes a
`CacheRequest`, in which everything that changes a number is written out; its id is the sha256 of
its canonical JSON. The same request is the same cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .canonical import MAX_INT, canonical_json
from .codes import Code
from .decimal_text import canonical_decimal
from .digest import is_digest
from .errors import RequestError
from .generation import Generation

SPEC_VERSION = "1"
DEFAULT_K = 16
DEFAULT_TAIL_SAMPLES = 16
DEFAULT_SHARD_POSITIONS = 262_144
MAX_K = 4096
MAX_TAIL_SAMPLES = 4096
MAX_SHARD_POSITIONS = 2**24
PROFILES = ("bf16", "fp16", "m5")
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Submission:
    """A cache request as a client posts it.

    `teacher` is a name that the server serves or a teacher's digest; `data` the digest of an uploaded
    data set. Rows keep the entries of their top k that are at least as probable as `min_prob`, and one at the least;
    it becomes canonical here, given as a number or as text. `tail_samples` "auto" means the default where the engine
    can draw them, else 0. With `generate` the data set is one of prompts, which the teacher continues before it scores
    what came of them.
    """

    teacher: str
    data: str
    k: int = DEFAULT_K
    min_prob: str | float = "0"
    tail_samples: int | str = AUTO
    seed: int = 0
    profile: str = "bf16"
    shard_positions: int = DEFAULT_SHARD_POSITIONS
    engine: str = AUTO
    dtype: str = AUTO
    generate: Generation | None = None

    def __post_init__(self) -> None:
        for name in ("teacher", "engine", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or len(value) > 256:
                raise RequestError(f"{name} must be a non-empty string of at most 256 characters, not {value!r}")
        if not is_digest(self.data):
            raise RequestError(f"data must be the digest of an uploaded data set (sha256:<hex>), not {self.data!r}")
        if self.tail_samples != AUTO:
            _check_int("tail_samples", self.tail_samples, 0, MAX_TAIL_SAMPLES)
        object.__setattr__(self, "min_prob", canonical_min_prob(self.min_prob))
        object.__setattr__(self, "generate", Generation.of(self.generate))
        _check_numbers(self)

    @classmethod
    def from_json(cls, value: Any) -> Submission:
        """Read a posted body, refusing unknown keys and missing ones."""
        return cls(**_checked_keys(cls, value, required={"teacher", "data"}))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object to post."""
        return asdict(self)

    def resolve(
        self,
        *,
        teacher: str,
        vocab_size: int,
        engine: str,
        dtype: str,
        head_dtype: str,
        draws_tail_samples: bool,
        generates: bool = True,
    ) -> CacheRequest:
        """Return the request with every open choice made, or say why it cannot be served."""
        for name, asked, served in (("engine", self.engine, engine), ("dtype", self.dtype, dtype)):
            if asked not in (AUTO, served):
                raise RequestError(f"{name} {asked!r} is not what this server runs the teacher with ({served!r})")
        if self.k > vocab_size:
            raise RequestError(f"k {self.k} is above the teacher's vocabulary of {vocab_size}", Code.K_OUT_OF_RANGE)
        drawn = DEFAULT_TAIL_SAMPLES if draws_tail_samples else 0
        tail_samples = drawn if self.tail_samples == AUTO else int(self.tail_samples)
        if tail_samples and not draws_tail_samples:
            raise RequestError(
                f"engine {engine!r} cannot draw tail samples; ask for tail_samples 0 or auto",
                Code.TAIL_SAMPLES_UNAVAILABLE,
            )
        if self.generate is not None and not generates:
            raise RequestError(f"engine {engine!r} scores what it is given, and cannot generate")
        return CacheRequest(
            teacher=teacher,
            data=self.data,
            engine=engine,
            dtype=dtype,
            head_dtype=head_dtype,
            k=self.k,
            min_prob=str(self.min_prob),
            tail_samples=tail_samples,
            seed=self.seed,
            profile=self.profile,
            shard_positions=self.shard_positions,
            generate=self.generate,
        )


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """A cache request in which nothing is left open."""

    teacher: str
    data: str
    engine: str
    dtype: str
    head_dtype: str
    k: int
    min_prob: str
    tail_samples: int
    seed: int
    profile: str
    shard_positions: int
    generate: Generation | None = None
    spec_version: str = SPEC_VERSION

    def __post_init__(self) -> None:
        if self.spec_version != SPEC_VERSION:
            raise RequestError(f"spec_version {self.spec_version!r} is not {SPEC_VERSION!r}")
        for name in ("teacher", "data"):
            if not is_digest(getattr(self, name)):
                raise RequestError(f"{name} must be a digest, not {getattr(self, name)!r}")
        for name in ("engine", "dtype", "head_dtype"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise RequestError(f"{name} must be a non-empty string")
        _check_int("tail_samples", self.tail_samples, 0, MAX_TAIL_SAMPLES)
        if canonical_min_prob(self.min_prob) != self.min_prob:
            raise RequestError(f"min_prob {self.min_prob!r} is not in its canonical form")
        object.__setattr__(self, "generate", Generation.of(self.generate))
        _check_numbers(self)

    @property
    def id(self) -> str:
        """The request's identity, 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def canonical(self) -> bytes:
        """Return the canonical JSON that the id is taken of."""
        return canonical_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the request, without `generate` where the teacher only scores."""
        value = asdict(self)
        if self.generate is None:
            del value["generate"]
        return value

    @classmethod
    def from_json(cls, value: Any) -> CacheRequest:
        """Read a stored request, refusing unknown and missing fields, and values that are not in their one form."""
        request = cls(**_checked_keys(cls, value, required={field.name for field in fields(cls)} - {"generate"}))
        if request.to_json() != value:
            raise RequestError("the request is not in its canonical form")
        return request


def canonical_min_prob(value: object) -> str:
    """Return the one text of a probability from 0 to below 1; see `canonical_decimal`.

    Raises:
        RequestError: it is none.
    """
    wanted = "from 0 to below 1"
    text = canonical_decimal("min_prob", value, wanted, "0.001")
    if not text.startswith("0"):
        raise RequestError(f"min_prob must be a decimal {wanted}, not {value!r}")
    return text


def _checked_keys(cls: type[Any], value: Any, required: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"expected a JSON object, not {type(value).__name__}")
    names = {field.name for field in fields(cls)}
    if unknown := set(value) - names:
        raise RequestError(f"unknown keys {sorted(unknown)}; known: {sorted(names)}")
    if missing := required - set(value):
        raise RequestError(f"missing keys {sorted(missing)}")
    return value


def _check_numbers(request: Submission | CacheRequest) -> None:
    _check_int("k", request.k, 1, MAX_K, Code.K_OUT_OF_RANGE)
    _check_int("seed", request.seed, 0, MAX_INT)
    _check_int("shard_positions", request.shard_positions, 1, MAX_SHARD_POSITIONS)
    if request.profile not in PROFILES:
        raise RequestError(f"profile {request.profile!r} is not one of {list(PROFILES)}")


def _check_int(name: str, value: object, low: int, high: int, code: Code = Code.INVALID_REQUEST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, not {value!r}", code)
