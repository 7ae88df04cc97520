"""Identity of bytes: `sha256:<64 hex digits>`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIGEST_PATTERN = r"sha256:[0-9a-f]{64}"
_DIGEST = re.compile(DIGEST_PATTERN)
_ID = re.compile(r"[0-9a-f]{64}")


def is_digest(text: object) -> bool:
    """Tell whether `text` is a digest."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def is_request_id(text: object) -> bool:
    """Tell whether `text` is a request id: 64 hex digits, no prefix."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the digest of the file at `path`."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def content_key(token_ids: npt.ArrayLike) -> bytes:
    """Return the 32-byte key of a sequence: sha256 of its token ids as u32 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<u4").tobytes()).digest()
