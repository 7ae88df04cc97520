"""Errors of the format, and the base of every error that teachercache raises on purpose.

TeachercacheError
└── FormatError
    ├── RequestError          a cache request that is not allowed
    ├── ManifestError         a manifest that is not one
    ├── DatasetError          an upload that is not a data set
    ├── TokenizerError        a folder whose tokenizer cannot be told
    ├── SourceError           a path that does not hold what is to be read from it
    ├── TargetError           a path that cannot be written
    ├── ColumnError           a column that a shard has not, or an array that cannot hold it
    └── ShardError            a shard that must not be read, or rows that must not be written
        ├── NotAShard         wrong magic, or too short to be one
        ├── UnsupportedVersion
        ├── UnsupportedFeature
        ├── TruncatedShard    the file is not as long as it says
        ├── CorruptFooter     table, metadata and index do not match their checksum, or break a rule
        │   ├── CorruptMetadata
        │   ├── CorruptTable
        │   └── CorruptIndex
        ├── CorruptFrame      the bytes of a sequence are damaged or inconsistent
        ├── LimitExceeded     a declared size is above a hard limit
        └── InvalidRows       rows that the format cannot hold
"""

from __future__ import annotations

from pathlib import Path

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


class SourceError(FormatError):
    """A path does not hold what is to be read from it."""

    code = Code.INVALID_DATASET

    @classmethod
    def of(cls, path: Path, error: OSError) -> SourceError:
        """Return the error that says why the system does not give `path`."""
        code = Code.NOT_FOUND if isinstance(error, FileNotFoundError) else None
        return cls(f"cannot read {path}: {error.strerror or error}", code)


class TargetError(FormatError):
    """A path cannot be written, or must not be."""

    code = Code.INVALID_CONFIG


class ColumnError(FormatError):
    """A column was asked for that the shard has not, or is to be read into an array that cannot hold it."""

    code = Code.INVALID_CONFIG


class ShardError(FormatError):
    """A shard breaks a clause of SPEC.md."""


class NotAShard(ShardError):
    """The bytes do not begin and end as a shard does (SPEC 3.1, 8.1)."""


class UnsupportedVersion(ShardError):
    """The shard's format_version is not one that this reader knows (SPEC 3.2)."""


class UnsupportedFeature(ShardError):
    """The shard requires a feature that this reader does not know (SPEC 3.3)."""


class TruncatedShard(ShardError):
    """The file is shorter or longer than its trailer says (SPEC 8.2)."""


class CorruptFooter(ShardError):
    """The footer is damaged, or its parts do not fill it (SPEC 8)."""


class CorruptMetadata(CorruptFooter):
    """The metadata breaks a rule (SPEC 6)."""


class CorruptTable(CorruptFooter):
    """The remap table breaks a rule (SPEC 5)."""


class CorruptIndex(CorruptFooter):
    """The index breaks a rule: its entries do not tile the file (SPEC 7)."""


class CorruptFrame(ShardError):
    """A frame is damaged, or what it holds breaks a rule (SPEC 4)."""


class LimitExceeded(ShardError):
    """A declared count or size is above its hard limit (SPEC 9)."""


class InvalidRows(ShardError):
    """The rows given to a writer cannot be stored (SPEC 4)."""

    code = Code.INVALID_ROWS
