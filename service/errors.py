"""Errors of the service.

TeachercacheError
└── ServiceError
    ├── InvalidSettings        a setting, variable or data directory that the server cannot run with
    │   └── AlreadyServed      another server holds the data directory
    ├── PortInUse
    ├── MissingExtra           a package of an optional extra is not installed
    ├── UnknownTeacher         no such teacher on this server, or its files have changed
    ├── UnsupportedTeacher     a folder that cannot be served
    ├── Unauthenticated        no token, or one that opens nothing
    ├── Forbidden              a token without the scope
    ├── NotFound
    ├── NoManifestYet
    ├── JobFailed
    ├── InvalidJson
    ├── LengthRequired
    ├── TooLarge
    ├── SlowBody
    ├── UnsupportedMediaType
    ├── RangeNotSatisfied      carries the size of the blob
    ├── DigestMismatch
    ├── InsufficientStorage
    ├── Draining
    ├── Unavailable
    ├── CorruptBlob            bytes on disk are not what their digest says
    ├── AuditFailed            rows that were scored again are not those that were stored
    ├── SequenceError          a sequence of the data set cannot be scored
    └── LeaseLost              someone else holds the range now; never leaves the worker
"""

from __future__ import annotations

from ..format_spec import Code, TeachercacheError


class ServiceError(TeachercacheError):
    """Base of all errors that the service raises on purpose."""


class InvalidSettings(ServiceError):
    """A setting, variable or data directory that the server cannot run with."""

    code = Code.INVALID_CONFIG


class AlreadyServed(InvalidSettings):
    """Another server holds the data directory."""


class PortInUse(ServiceError):
    """Another program listens on the port."""

    code = Code.PORT_IN_USE


class MissingExtra(ServiceError):
    """A package of an optional extra is not installed."""

    code = Code.MISSING_EXTRA


class UnknownTeacher(ServiceError):
    """No such teacher on this server, or its files have changed."""

    code = Code.UNKNOWN_TEACHER


class UnsupportedTeacher(ServiceError):
    """A folder that cannot be served."""

    code = Code.UNSUPPORTED_TEACHER


class Unauthenticated(ServiceError):
    """No token, or one that opens nothing."""

    code = Code.UNAUTHENTICATED


class Forbidden(ServiceError):
    """A token without the scope that is needed."""

    code = Code.FORBIDDEN


class NotFound(ServiceError):
    """Nothing has this digest, id or path."""

    code = Code.NOT_FOUND


class NoManifestYet(ServiceError):
    """The request has no committed shard so far."""

    code = Code.NO_MANIFEST_YET


class JobFailed(ServiceError):
    """The request has failed, or is not in a state that allows what was asked."""

    code = Code.JOB_FAILED


class InvalidJson(ServiceError):
    """The body is not JSON."""

    code = Code.INVALID_JSON


class LengthRequired(ServiceError):
    """An upload without Content-Length."""

    code = Code.LENGTH_REQUIRED


class TooLarge(ServiceError):
    """A body above its limit."""

    code = Code.TOO_LARGE


class SlowBody(ServiceError):
    """Nothing of a body came for too long."""

    code = Code.SLOW_BODY


class UnsupportedMediaType(ServiceError):
    """A body that is declared as something else than JSON."""

    code = Code.UNSUPPORTED_MEDIA_TYPE


class RangeNotSatisfied(ServiceError):
    """A Range outside a blob of `size` bytes."""

    code = Code.RANGE_NOT_SATISFIABLE

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class DigestMismatch(ServiceError):
    """The bytes are not those that the digest names."""

    code = Code.DIGEST_MISMATCH


class InsufficientStorage(ServiceError):
    """The disk is full, or would fall below its reserve."""

    code = Code.INSUFFICIENT_STORAGE


class Draining(ServiceError):
    """The server is shutting down and takes no new work."""

    code = Code.DRAINING


class Unavailable(ServiceError):
    """The server cannot answer now."""

    code = Code.UNAVAILABLE


class CorruptBlob(ServiceError):
    """Bytes on disk are not what their digest says."""

    code = Code.CORRUPT


class AuditFailed(ServiceError):
    """Rows that were scored again are not those that were stored."""

    code = Code.AUDIT_FAILED


class SequenceError(ServiceError):
    """A sequence of the data set cannot be scored; the code says which rule it breaks."""

    code = Code.INVALID_DATASET


class LeaseLost(ServiceError):
    """Someone else holds the range now; what was computed for it is thrown away."""
