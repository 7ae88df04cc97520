"""Every error code, once: its HTTP status, the exit code of the command line, and whether a retry can help."""

from __future__ import annotations

from enum import Enum

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_AUTH = 4
EXIT_JOB_FAILED = 5
EXIT_INTEGRITY = 6
EXIT_TIMEOUT = 7
EXIT_RETRY_LATER = 75


class Code(Enum):
    """A stable error code; the value is (wire name, HTTP status, exit code, retryable)."""

    INVALID_REQUEST = ("invalid_request", 422, EXIT_USAGE, False)
    INVALID_DATASET = ("invalid_dataset", 422, EXIT_USAGE, False)
    INVALID_JSON = ("invalid_json", 400, EXIT_USAGE, False)
    INVALID_ROWS = ("invalid_rows", 422, EXIT_USAGE, False)
    UNKNOWN_TEACHER = ("unknown_teacher", 404, EXIT_NOT_FOUND, False)
    UNSUPPORTED_TEACHER = ("unsupported_teacher", 422, EXIT_USAGE, False)
    TAIL_SAMPLES_UNAVAILABLE = ("tail_samples_unavailable", 422, EXIT_USAGE, False)
    TOKEN_OUT_OF_VOCABULARY = ("token_out_of_vocabulary", 422, EXIT_USAGE, False)
    SEQUENCE_TOO_LONG = ("sequence_too_long", 422, EXIT_USAGE, False)
    SEQUENCE_TOO_SHORT = ("sequence_too_short", 422, EXIT_USAGE, False)
    K_OUT_OF_RANGE = ("k_out_of_range", 422, EXIT_USAGE, False)
    UNAUTHENTICATED = ("unauthenticated", 401, EXIT_AUTH, False)
    FORBIDDEN = ("forbidden", 403, EXIT_AUTH, False)
    NOT_FOUND = ("not_found", 404, EXIT_NOT_FOUND, False)
    NO_MANIFEST_YET = ("no_manifest_yet", 404, EXIT_RETRY_LATER, True)
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405, EXIT_USAGE, False)
    SLOW_BODY = ("slow_body", 408, EXIT_RETRY_LATER, True)
    LENGTH_REQUIRED = ("length_required", 411, EXIT_USAGE, False)
    TOO_LARGE = ("too_large", 413, EXIT_USAGE, False)
    UNSUPPORTED_MEDIA_TYPE = ("unsupported_media_type", 415, EXIT_USAGE, False)
    RANGE_NOT_SATISFIABLE = ("range_not_satisfiable", 416, EXIT_USAGE, False)
    DIGEST_MISMATCH = ("digest_mismatch", 400, EXIT_INTEGRITY, False)
    INSUFFICIENT_STORAGE = ("insufficient_storage", 507, EXIT_RETRY_LATER, True)
    DRAINING = ("draining", 503, EXIT_RETRY_LATER, True)
    UNAVAILABLE = ("unavailable", 503, EXIT_RETRY_LATER, True)
    INTERNAL = ("internal", 500, 1, False)
    JOB_FAILED = ("job_failed", 409, EXIT_JOB_FAILED, False)
    CORRUPT = ("corrupt", 500, EXIT_INTEGRITY, False)
    AUDIT_FAILED = ("audit_failed", 409, EXIT_INTEGRITY, False)
    TOKENIZER_MISMATCH = ("tokenizer_mismatch", 409, EXIT_INTEGRITY, False)
    UNSUPPORTED_STUDENT = ("unsupported_student", 422, EXIT_USAGE, False)
    INVALID_CONFIG = ("invalid_config", 422, EXIT_USAGE, False)
    TIMEOUT = ("timeout", 504, EXIT_TIMEOUT, True)
    CONNECTION = ("connection", 503, EXIT_RETRY_LATER, True)
    PORT_IN_USE = ("port_in_use", 503, EXIT_USAGE, False)
    MISSING_EXTRA = ("missing_extra", 500, EXIT_USAGE, False)

    def __init__(self, wire: str, status: int, exit_code: int, retryable: bool) -> None:
        self.wire = wire
        self.status = status
        self.exit_code = exit_code
        self.retryable = retryable

    @classmethod
    def from_wire(cls, wire: str) -> Code:
        """Return the code with this wire name; an unknown one (a newer server) is INTERNAL."""
        return next((code for code in cls if code.wire == wire), cls.INTERNAL)
