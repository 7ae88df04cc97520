"""A cache as a stream of batches: verified, shuffled, split over ranks, resumable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..format_spec import Manifest
from .batch import TopkBatch
from .blobs import DEFAULT_LIMIT_BYTES
from .client import Client
from .directory import CacheDirectory
from .errors import ConfigError
from .order import Plan
from .prefetch import Prefetcher
from .reader import SequenceReader
from .source import DirectorySource, ServerSource, Source
from .transport import DEFAULT_RETRY_S


def stream_topk(
    url: str | Path | None,
    cache: str | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    epochs: int | None = 1,
    shuffle: bool = True,
    rank: int = 0,
    world_size: int = 1,
    cursor: int = 0,
    follow: bool = False,
    cache_dir: Path | str | None = None,
    token: str | None = None,
    prefetch: int = 2,
    cache_limit_bytes: int = DEFAULT_LIMIT_BYTES,
    retry_s: float = DEFAULT_RETRY_S,
) -> TopkStream:
    """Stream a cache as batches of `batch_size` sequences for this rank.

    `url` is a server (None: TEACHERCACHE_URL) or a directory that `Client.pull` made; `cache` a request
    id or manifest digest. The order depends on `seed` and epoch alone, so a run can be resumed at
    `cursor` (sequences that all ranks have consumed) with any world size and batch size. Every rank makes
    the same number of steps: the last batch of an epoch is filled up with sequences in which nothing
    counts. `epochs` None never ends.

    A request that still runs is waited for. With `follow`, which needs `shuffle=False`, the stream begins
    at once and yields sequences as the teacher finishes them. Shuffling reads all over the cache, so all
    of it must fit into `cache_limit_bytes`. `prefetch` batches are made ahead in a thread; 0 for none.

    Raises:
        ConfigError: arguments that cannot work.
        ClientError: what may go wrong on the way, while iterating, too; RequestFailed when the teacher gave up.
    """
    if follow and shuffle:
        raise ConfigError("follow needs shuffle=False: an order over all sequences needs all of them")
    if prefetch < 0:
        raise ConfigError(f"prefetch must be at least 0, not {prefetch}")
    # Built before the number of sequences is known, so that a bad argument shows before a long wait.
    plan = Plan(1, batch_size, seed, epochs, shuffle, rank, world_size)
    source: Source
    if url is None or (isinstance(url, str) and "://" in url):
        if cache is None:
            raise ConfigError("name the cache to stream: a request id or a manifest digest")
        client = Client(url, token, cache_dir, cache_limit_bytes=cache_limit_bytes, retry_s=retry_s)
        try:
            source = ServerSource(client, cache, follow=follow)
            _check_room(client, source.manifest, shuffle)
        except BaseException:
            client.close()
            raise
    else:
        source = DirectorySource(CacheDirectory(url), cache)
    return TopkStream(source, replace(plan, num_sequences=source.manifest.sequences), cursor=cursor, prefetch=prefetch)


class TopkStream:
    """An iterator of `TopkBatch`, made by `stream_topk`; a context manager.

    Has no use for a DataLoader: it works ahead by itself. In a process forked from the one that made it,
    it goes on from the same place with a thread and connections of its own.
    """

    def __init__(self, source: Source, plan: Plan, *, cursor: int = 0, prefetch: int = 2) -> None:
        self._source = source
        self._plan = plan
        self._prefetch = prefetch
        self._cursor = plan.check_cursor(cursor)
        self._reader: SequenceReader | None = None
        self._batches: Iterator[TopkBatch] | None = None
        self._pid = os.getpid()
        self._closed = False

    def __iter__(self) -> TopkStream:
        return self

    def __next__(self) -> TopkBatch:
        if self._closed:
            raise ConfigError("the stream is closed")
        if self._batches is None or self._pid != os.getpid():
            self._start()
        assert self._batches is not None
        try:
            batch = next(self._batches)
        except Exception:
            # The next call begins again at the cursor: after the end that is the end, after an error another try.
            self._stop()
            raise
        self._cursor = batch.cursor
        return batch

    def __len__(self) -> int:
        """Batches that are left; the same on every rank."""
        steps = self._plan.num_steps(self._cursor)
        if steps is None:
            raise TypeError("a stream without end has no length")
        return steps

    def __enter__(self) -> TopkStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and isinstance(self._batches, Prefetcher) and self._pid == os.getpid():
            self._batches.stop()
            self._source.cancel()

    @property
    def manifest(self) -> Manifest:
        """The cache's manifest; the newest one seen while the teacher still runs."""
        return self._source.manifest

    @property
    def cursor(self) -> int:
        """Sequences that all ranks have consumed, over all epochs."""
        return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on after the last batch taken; the same on every rank."""
        return {
            "request": self.manifest.request.id,
            "seed": self._plan.seed,
            "shuffle": self._plan.shuffle,
            "cursor": self._cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, whatever world size and batch size it was taken with.

        Raises:
            ConfigError: it was taken from another cache, or in another order.
        """
        for name, value in self.state_dict().items():
            if name not in state:
                raise ConfigError(f"the state has no {name!r}")
            if name != "cursor" and state[name] != value:
                raise ConfigError(f"the state was taken with {name} {state[name]!r}, this stream has {value!r}")
        self._stop()
        self._cursor = self._plan.check_cursor(state["cursor"])

    def close(self) -> None:
        """Stop the thread and close files and connections; safe to repeat."""
        if not self._closed:
            self._closed = True
            self._source.cancel()
            self._stop()
            self._source.close()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._reader = SequenceReader(self._source)
        batches = _batches(self._reader, self._plan, self._cursor)
        self._batches = Prefetcher(batches, self._prefetch, "teachercache-stream") if self._prefetch else batches

    def _stop(self) -> None:
        batches, self._batches = self._batches, None
        reader, self._reader = self._reader, None
        if self._pid != os.getpid():
            return
        if isinstance(batches, Prefetcher):
            batches.stop()
            batches.join()
        if reader is not None:
            reader.close()


def _batches(reader: SequenceReader, plan: Plan, cursor: int) -> Iterator[TopkBatch]:
    for step in plan.steps(cursor):
        reader.reach(step.cursor - step.epoch * plan.num_sequences)
        numbers = step.numbers.tolist()
        like = numbers[0] if numbers else int(step.taken[0])
        yield reader.read_batch(numbers, like=like, batch_size=plan.batch_size, cursor=step.cursor, epoch=step.epoch)


def _check_room(client: Client, manifest: Manifest, shuffle: bool) -> None:
    if shuffle:
        client.cache.check_room(manifest.num_bytes, "shuffling the whole cache")
    elif manifest.shards:
        client.cache.check_room(max(shard.bytes for shard in manifest.shards), "the largest shard")
