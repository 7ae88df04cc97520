"""Reads sequences of a cache by their number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from ..format_spec import (
    Manifest,
    ScoredSequence,
    Shard,
    ShardDescriptor,
    ShardError,
    UnsupportedFeature,
    UnsupportedVersion,
)
from .batch import RowKind, TopkBatch, columns_of, new_batch, settle
from .errors import CacheIncomplete, ConfigError, IntegrityError
from .source import Source, covered

MAX_OPEN_SHARDS = 128
ATTEMPTS = 3
Read = TypeVar("Read")


class SequenceReader:
    """Opens shards when they are first needed, keeps the last ones open, and has damaged ones repaired."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._open: OrderedDict[str, Shard] = OrderedDict()
        self._load(source.manifest)

    def reach(self, sequences: int) -> None:
        """Wait until the first `sequences` sequences can be read."""
        if self._covered < sequences:
            self._load(self._source.reach(sequences))

    def read(self, number: int) -> ScoredSequence:
        """Return sequence `number` of the data set.

        Raises:
            IntegrityError: its shard is damaged and stays so.
        """
        return self._try(number, Shard.read)

    def read_batch(
        self, numbers: Sequence[int], *, like: int, batch_size: int, cursor: int = 0, epoch: int = 0
    ) -> TopkBatch:
        """Return the batch of these sequences, decoded in place; sequence `like` says what the rows of none have.

        Raises:
            IntegrityError: a shard is damaged and stays so.
            InvalidRows: sequences with different columns.
        """
        kind = self._try(like, lambda shard, _: RowKind.of_shard(shard.metadata))
        found = [self._try(n, lambda shard, i: (shard.length(i), RowKind.of_shard(shard.metadata))) for n in numbers]
        kind.check(other for _, other in found)
        lengths = [length for length, _ in found]
        batch = new_batch(kind, lengths, batch_size=batch_size, cursor=cursor, epoch=epoch)
        for b, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            columns = columns_of(batch, b, length)
            self._try(number, partial(Shard.read_into, columns=columns))
            settle(batch, b, columns)
        return batch

    def find(self, key: bytes) -> Iterator[int]:
        """Yield the numbers of the sequences with this content key."""
        for shard in self._manifest.shards:
            for number in self._try(shard.first, lambda opened, _: opened.find(key)):
                yield shard.first + number

    def close(self) -> None:
        """Close the shards."""
        while self._open:
            self._open.popitem()[1].close()

    def _try(self, number: int, read: Callable[[Shard, int], Read]) -> Read:
        """Return what `read` makes of a sequence's shard and its number there, having damage repaired."""
        shard = self._locate(number)
        where = f"sequence {number} (number {number - shard.first} of shard {shard.digest})"
        for attempt in range(ATTEMPTS):
            try:
                return read(self._opened(shard), number - shard.first)
            except (UnsupportedVersion, UnsupportedFeature):
                raise
            except (ShardError, OSError) as error:
                self._drop(shard)
                if attempt == ATTEMPTS - 1:
                    raise IntegrityError(f"{where} cannot be read: {error}") from error
                self._source.repair(shard, error)
        raise AssertionError("unreachable")

    def _locate(self, number: int) -> ShardDescriptor:
        if not 0 <= number < self._manifest.sequences:
            raise ConfigError(f"sequence {number} of a cache of {self._manifest.sequences}")
        place = int(np.searchsorted(self._firsts, number, side="right")) - 1
        if place < 0 or number >= self._firsts[place] + self._manifest.shards[place].sequences:
            raise CacheIncomplete(f"the teacher has not come to sequence {number} yet")
        return self._manifest.shards[place]

    def _load(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._firsts = np.array([shard.first for shard in manifest.shards], np.int64)
        self._covered = covered(manifest)

    def _opened(self, descriptor: ShardDescriptor) -> Shard:
        shard = self._open.get(descriptor.digest)
        if shard is None:
            shard = self._source.open(descriptor)
            try:
                self._check(shard, descriptor)
            except IntegrityError:
                shard.close()
                raise
            self._open[descriptor.digest] = shard
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(descriptor.digest)
        return shard

    def _check(self, shard: Shard, descriptor: ShardDescriptor) -> None:
        request, own = self._manifest.request, shard.metadata
        said = (self._manifest.fingerprint, request.k, request.tail_samples, request.profile)
        held = (own.fingerprint, own.k, own.tail_samples, own.profile)
        counts = (shard.num_sequences, shard.num_positions)
        if held != said or counts != (descriptor.sequences, descriptor.positions):
            raise IntegrityError(f"shard {descriptor.digest} is sound, but is not what its manifest says")

    def _drop(self, descriptor: ShardDescriptor) -> None:
        shard = self._open.pop(descriptor.digest, None)
        if shard is not None:
            shard.close()
