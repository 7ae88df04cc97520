"""What the server tells Prometheus: requests and tokens from the records, answers as they are given.

Labels have few values: a route's template and never its path.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .state import State

# a client may invent paths and methods
OTHER = "other"
METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE"}


class Metrics:
    """The metrics of one app."""

    def __init__(self, state: State) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(Records(state))
        self.answers = Counter(
            "teachercache_http_requests", "Answers given", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "teachercache_http_request_seconds", "Until an answer was sent", ["route"], registry=self.registry
        )


class Records:
    """What the database, the store and the supervisor know, read when somebody asks."""

    def __init__(self, state: State) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Nothing: to be registered must not cost a query."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        totals = self._state.meta.totals()
        requests = GaugeMetricFamily("teachercache_requests", "Requests by state", labels=["state"])
        for name, count in totals.requests.items():
            requests.add_metric([name], count)
        yield requests
        yield CounterMetricFamily(
            "teachercache_tokens_scored", "Tokens that a teacher ran, again counted again", totals.tokens_scored
        )
        yield CounterMetricFamily(
            "teachercache_tokens_reused", "Tokens of shards that another request had made", totals.tokens_reused
        )
        stored = GaugeMetricFamily("teachercache_blob_bytes", "Bytes stored, by kind", labels=["kind"])
        for name, size in totals.bytes.items():
            stored.add_metric([name], size)
        yield stored
        free = self._state.store.free_bytes()
        yield GaugeMetricFamily("teachercache_free_bytes", "Bytes free above the reserve", max(free, 0))
        ready = int(self._state.supervisor.ready)
        yield GaugeMetricFamily("teachercache_worker_ready", "Whether workers stay alive", ready)


class Measured:
    """ASGI middleware that counts answers and their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route: Any = scope.get("route")
            template = getattr(route, "path", OTHER)
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._metrics.answers.labels(method, template, str(status)).inc()
            self._metrics.seconds.labels(template).observe(time.perf_counter() - begin)
