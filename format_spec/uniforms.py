"""The random numbers behind tail samples: the same everywhere for the same seed, sequence and row."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt


def tail_uniforms(seed: int, content_key: bytes, num_rows: int) -> npt.NDArray[np.float64]:
    """Return the uniform u of each row, strictly inside (0, 1).

    Row i takes the i-th raw uint64 r of Philox keyed with the first 16 bytes of
    sha256(seed as u64 little-endian || content_key): u = ((r >> 32) + 0.5) / 2^32.
    float64 matters: in float32 (u + 15) / 16 rounds to 1.
    """
    key = hashlib.sha256(struct.pack("<Q", seed) + content_key).digest()[:16]
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_rows)
    uniforms: npt.NDArray[np.float64] = ((raw >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
    return uniforms
