"""Errors of the client.

TeachercacheError
└── ClientError
    ├── ConfigError         an argument or a TEACHERCACHE_ variable that cannot work
    ├── CacheUnusable       the local cache's folder cannot be used, or its limit is too small
    ├── OfflineMiss         TEACHERCACHE_OFFLINE is set and the local cache lacks what was asked for
    ├── ConnectionFailed    no complete answer from the server within the retry time
    ├── ServerError         the server answered with a problem
    ├── BadAnswer           the server's answer breaks the API
    ├── CacheNotFound       no such request, manifest or local cache
    ├── CacheIncomplete     the teacher has not finished what is needed
    ├── RequestFailed       the teacher cannot finish the request
    ├── WaitTimeout         the time given to wait is over
    └── IntegrityError      bytes are not what their digest or checksum says
"""

from __future__ import annotations

from ..format_spec import Code, TeachercacheError


class ClientError(TeachercacheError):
    """Base of all errors that the client raises on purpose."""


class ConfigError(ClientError):
    """An argument, or one of the TEACHERCACHE_ variables, cannot work."""

    code = Code.INVALID_CONFIG


class CacheUnusable(ClientError):
    """The local cache's folder cannot be written, or its byte limit is below what is needed."""

    code = Code.INVALID_CONFIG


class OfflineMiss(ClientError):
    """The network is switched off and the local cache lacks what was asked for."""

    code = Code.NOT_FOUND


class ConnectionFailed(ClientError):
    """The server gave no complete answer within the retry time."""

    code = Code.CONNECTION


class ServerError(ClientError):
    """The server refused: `status` is the HTTP status, `detail` its own words.

    `retry_after_s` is the pause that it asked for, in seconds.
    """

    def __init__(self, detail: str, code: Code, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(f"{detail} (HTTP {status})", code)
        self.detail = detail
        self.status = status
        self.retry_after_s = retry_after_s


class BadAnswer(ClientError):
    """The server's answer is not what the API promises, or a redirect that must not be followed."""


class CacheNotFound(ClientError):
    """The server, or the local directory, has no such cache."""

    code = Code.NOT_FOUND


class CacheIncomplete(ClientError):
    """The teacher has not finished what is needed; waiting helps."""

    code = Code.NO_MANIFEST_YET


class RequestFailed(ClientError):
    """The request has failed on the server; `reason` is the wire name of why."""

    code = Code.JOB_FAILED

    def __init__(self, request_id: str, reason: str, detail: str) -> None:
        super().__init__(f"request {request_id} failed: {detail} ({reason})")
        self.request_id = request_id
        self.reason = reason
        self.detail = detail


class WaitTimeout(ClientError):
    """The request is not finished and the time given to wait is over."""

    code = Code.TIMEOUT


class IntegrityError(ClientError):
    """Bytes are damaged: they are not what their digest or checksum says."""

    code = Code.DIGEST_MISMATCH
