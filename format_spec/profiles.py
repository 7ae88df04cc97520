"""Value profiles: how a logprob becomes a 16-bit code, and how many digits that keeps (SPEC 4.5).

A code is the magnitude's bit pattern on a coarser floating-point grid. Patterns of magnitudes order as the
magnitudes do, so along a row codes never fall, and their differences are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UInt16 = npt.NDArray[np.uint16]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Profile:
    """A grid: `shift` low bits of a float32 pattern are dropped; None is IEEE half precision."""

    name: str
    shift: int | None

    @property
    def infinity(self) -> int:
        """The code of a magnitude that is no number: padding."""
        return 0x7C00 if self.shift is None else 0x7F800000 >> self.shift

    def encode(self, logprobs: npt.NDArray[np.floating]) -> UInt16:
        """Return the codes of logprobs, rounded to nearest, ties to even."""
        magnitudes = np.abs(logprobs).astype(np.float32)
        if self.shift is None:
            with np.errstate(over="ignore"):
                halves: UInt16 = magnitudes.astype(np.float16).view(np.uint16)
            return halves
        bits = magnitudes.view(np.uint32)
        half = np.uint32((1 << (self.shift - 1)) - 1)
        rounded = (bits + half + ((bits >> np.uint32(self.shift)) & np.uint32(1))) >> np.uint32(self.shift)
        codes: UInt16 = rounded.astype(np.uint16)
        return codes

    def decode(self, codes: UInt16, out: Float32 | None = None) -> Float32:
        """Return the logprobs that codes stand for, into `out` where given."""
        if out is None:
            out = np.empty(codes.shape, np.float32)
        if self.shift is None:
            return np.negative(codes.view(np.float16), out=out, dtype=np.float32)
        bits = out.view(np.uint32)
        np.left_shift(codes, np.uint32(self.shift), out=bits, dtype=np.uint32)
        np.bitwise_or(bits, np.uint32(1 << 31), out=bits)
        return out


PROFILES = {profile.name: profile for profile in (Profile("fp16", None), Profile("bf16", 16), Profile("m5", 18))}
