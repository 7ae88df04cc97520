"""Ask a server for caches, and stream them: verified, resumable, deterministic."""

from .batch import TopkBatch, collate
from .client import Client
from .errors import (
    BadAnswer,
    CacheIncomplete,
    CacheNotFound,
    CacheUnusable,
    ClientError,
    ConfigError,
    ConnectionFailed,
    IntegrityError,
    OfflineMiss,
    RequestFailed,
    ServerError,
    WaitTimeout,
)
from .sequences import Sequences
from .stream import TopkStream, stream_topk
from .views import Estimate, RequestView, Teacher

__all__ = [
    "BadAnswer",
    "CacheIncomplete",
    "CacheNotFound",
    "CacheUnusable",
    "Client",
    "ClientError",
    "ConfigError",
    "ConnectionFailed",
    "Estimate",
    "IntegrityError",
    "OfflineMiss",
    "RequestFailed",
    "RequestView",
    "Sequences",
    "ServerError",
    "Teacher",
    "TopkBatch",
    "TopkStream",
    "WaitTimeout",
    "collate",
    "stream_topk",
]
