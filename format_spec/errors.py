"""Errors of the format, and the base of every error that teachercache raises on purpose.

TeachercacheError
└── FormatError
    ├── RequestError          a cache request that is not allowed
    ├── ManifestError         a manifest that is not one
    ├── DatasetError          an upload that is not a data set
    ├── TokenizerError        a folder whose tokenizer cannot be told
    └── ShardError            a shard that must not be read, or rows that must not be written
        ├── NotAShard         wrong magic, or too short to be one
        ├── UnsupportedVersion
        ├── UnsupportedFeature
        ├── TruncatedShard    the file is not as long as it says
        ├── CorruptHeader
        ├── CorruptIndex
        ├── CorruptFrame      the bytes of a sequence are damaged or inconsistent
        ├── LimitExceeded     a declared size is above a hard limit
        └── InvalidRows       rows that the format cannot hold
"""

from __future__ import annotations

from .codes import Code


class TeachercacheError(Exception):
    """Base of all errors raised on purpose; `code` is the stable name of what went wrong."""

    code: Code = Code.INTERNAL

    def __init__(self, message: str, code: Code | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class FormatError(TeachercacheError):
    """A request, manifest, data set or shard breaks a rule of the format."""

    code = Code.CORRUPT


class RequestError(FormatError):
    """A cache request is malformed or asks for what cannot be had."""

    code = Code.INVALID_REQUEST


class ManifestError(FormatError):
    """A manifest is malformed or does not match what it is used for."""


class DatasetError(FormatError):
    """An upload is not a data set that a teacher can score."""

    code = Code.INVALID_DATASET


class TokenizerError(FormatError):
    """A folder has no tokenizer, or one that cannot be read."""

    code = Code.UNSUPPORTED_TEACHER


class ShardError(FormatError):
    """A shard breaks a clause of SPEC.md."""


class NotAShard(ShardError):
    """The bytes do not begin and end as a shard does (SPEC 3.1, 7.1)."""


class UnsupportedVersion(ShardError):
    """The shard's format_version is not one that this reader knows (SPEC 3.2)."""


class UnsupportedFeature(ShardError):
    """The shard requires a feature that this reader does not know (SPEC 3.3)."""


class TruncatedShard(ShardError):
    """The file is shorter or longer than its trailer says (SPEC 7.2)."""


class CorruptHeader(ShardError):
    """The JSON header is damaged or breaks a rule (SPEC 3.4, 4)."""


class CorruptIndex(ShardError):
    """The index is damaged, or its entries do not tile the file (SPEC 6)."""


class CorruptFrame(ShardError):
    """A frame is damaged, or what it holds breaks a rule (SPEC 5)."""


class LimitExceeded(ShardError):
    """A declared count or size is above its hard limit (SPEC 8)."""


class InvalidRows(ShardError):
    """The rows given to a writer cannot be stored (SPEC 5)."""

    code = Code.INVALID_ROWS
