"""DistillKit's compression config: how the bytes of a row are to be read."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .errors import SourceError

CONFIG_NAME = "compression_config.yaml"
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SPECIAL_TERMS = ("sqrt", "exp")


@dataclass(frozen=True, slots=True)
class ResidualBin:
    """`num_elements` values of `element_bits` bits each, with one scale."""

    scale_dtype: str
    element_bits: int
    num_elements: int

    def __post_init__(self) -> None:
        _check_dtypes(self.scale_dtype)
        _check_count("element_bits", self.element_bits, 1, 64)
        _check_count("num_elements", self.num_elements, 1)


@dataclass(frozen=True, slots=True)
class DistillKitConfig:
    """DistillKit's DistributionQuantizationConfig, with its defaults; `d` is the size of the vocabulary."""

    d: int
    k: int
    exact_k: int
    residual_bins: tuple[ResidualBin, ...]
    exact_dtype: str = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: str = "float32"
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    def __post_init__(self) -> None:
        _check_dtypes(self.exact_dtype, self.term_dtype)
        _check_count("d", self.d, 2)
        _check_count("k", self.k, 1)
        _check_count("exact_k", self.exact_k, 0, self.k)
        for name in ("delta_encoding", "error_diffusion", "normalize_t"):
            if not isinstance(getattr(self, name), bool):
                raise SourceError(f"{name} is {getattr(self, name)!r}, not true or false")
        for term in self.polynomial_terms:
            if term not in SPECIAL_TERMS and (not isinstance(term, int) or isinstance(term, bool)):
                raise SourceError(f"polynomial term {term!r} is neither a power nor one of {list(SPECIAL_TERMS)}")
        if self.num_residuals > self.num_approximated:
            raise SourceError(f"{self.num_residuals} residuals for {self.num_approximated} approximated values")

    @property
    def num_approximated(self) -> int:
        """Values of a row that are not stored exactly."""
        return self.k - self.exact_k

    @property
    def num_residuals(self) -> int:
        """Approximated values, the first ones, that have a residual."""
        return sum(part.num_elements for part in self.residual_bins)

    @property
    def id_bits(self) -> int:
        """Bits of a token id."""
        # float32, as DistillKit rounds: from a vocabulary of 2^21 on this may be one bit less
        return int(np.ceil(np.log2(np.float32(self.d))))

    @property
    def id_bytes(self) -> int:
        """Bytes of a row's token ids."""
        return -(-self.k * self.id_bits // 8)

    @property
    def part_bytes(self) -> list[int]:
        """Bytes of the parts of a row's values: exact ones, coefficients, then scale and residuals of each bin."""
        sizes = [self.exact_k * WIDTHS[self.exact_dtype], len(self.polynomial_terms) * WIDTHS[self.term_dtype]]
        for part in self.residual_bins:
            sizes += [WIDTHS[part.scale_dtype], -(-part.num_elements * part.element_bits // 8)]
        return sizes

    @classmethod
    def load(cls, path: Path) -> DistillKitConfig:
        """Read a compression_config.yaml, a run's config that has one under teacher.logprob_compressor, or JSON.

        Raises:
            SourceError: it is none.
        """
        try:
            text = path.read_text()
        except OSError as error:
            raise SourceError.of(path, error) from error
        return cls.from_json(_parse(path, text))

    @classmethod
    def from_json(cls, value: Any) -> DistillKitConfig:
        """Read a config, refusing what this reader does not know: it might change what the bytes mean."""
        try:
            value = value.get("teacher", {}).get("logprob_compressor", value)
            known = {name: item for name, item in value.items() if item is not None}
            bins = tuple(ResidualBin(**part) for part in known.pop("residual_bins"))
            terms = tuple(known.pop("polynomial_terms", ()))
            return cls(residual_bins=bins, polynomial_terms=terms, **known)
        except (AttributeError, KeyError, TypeError) as error:
            names = [field.name for field in fields(cls)]
            raise SourceError(f"not a compression config of DistillKit, with the keys {names}: {error}") from error


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise SourceError(f"{path} is not JSON: {error}") from error
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SourceError(f"{path} is not YAML: {error}") from error


def _check_dtypes(*dtypes: str) -> None:
    for dtype in dtypes:
        if dtype not in WIDTHS:
            raise SourceError(f"dtype {dtype!r} is not one of {list(WIDTHS)}")


def _check_count(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limits = f"from {low}" if high is None else f"from {low} to {high}"
        raise SourceError(f"{name} is {value!r}, allowed are integers {limits}")
