"""Errors of the demo: each message is one line that says what to do.

TeachercacheError
└── DemoError
    ├── TextMissing            this Python carries no documentation topics
    ├── ServerFailed           the demo's own cache server did not do its part
    └── ModelUnavailable       the teacher cannot be made on this machine
        ├── LibraryMissing     the extra `demo` is not installed
        ├── PipMissing
        ├── DownloadFailed     no network, no index, or no such wheel on it
        ├── WrongDigest        other bytes than the pinned ones
        └── CacheUnusable      the cache folder cannot be written
            └── NotEnoughDisk
"""

from __future__ import annotations

from ..format_spec import Code, TeachercacheError


class DemoError(TeachercacheError):
    """Base of all errors that the demo raises on purpose."""


class TextMissing(DemoError):
    """The documentation topics were left out of this Python."""


class ServerFailed(DemoError):
    """The demo's cache server did not start, or its teacher did not leave."""

    code = Code.UNAVAILABLE


class ModelUnavailable(DemoError):
    """The teacher's directory is neither in the cache nor can it be made."""


class LibraryMissing(ModelUnavailable):
    """A library of the extra `demo` is not installed."""

    code = Code.MISSING_EXTRA


class PipMissing(ModelUnavailable):
    """This Python has no pip to download with."""


class DownloadFailed(ModelUnavailable):
    """Pip could not download the wheel that holds the model."""

    code = Code.CONNECTION


class WrongDigest(ModelUnavailable):
    """A file is not, byte for byte, the one that was pinned."""

    code = Code.DIGEST_MISMATCH


class CacheUnusable(ModelUnavailable):
    """The cache folder cannot be written."""


class NotEnoughDisk(CacheUnusable):
    """The file system of the cache folder has too little free space."""

    code = Code.INSUFFICIENT_STORAGE
