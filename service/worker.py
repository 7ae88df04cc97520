"""The process that runs the teacher: one task after the other, each under a lease.

What a shard holds depends on its range and request alone: batches are fixed by the range, and no time or host
enters. So a range that is scored again after a crash gives the same shard, where the engine repeats its bits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import Event
from typing import BinaryIO, cast

import numpy as np

from ..format_spec import (
    PAD_ID,
    Example,
    Fingerprint,
    QualityTally,
    Rows,
    ScoredSequence,
    Shard,
    ShardDescriptor,
    ShardMetadata,
    ShardWriter,
    TeachercacheError,
)
from ..format_spec.request import CacheRequest
from .audit import audit_shard, check, is_audited
from .engines import Engine, EngineDied, EngineError, load_engine
from .errors import CorruptBlob, LeaseLost, UnknownTeacher, UnsupportedTeacher
from .generate import complete
from .meta import PLAN, CommittedShard, Failure, Lease, Meta, RequestRow, owner_of
from .plan import TokenFiles, cut, make_plan, num_tokens, token_ids
from .repair import checked_path
from .settings import Settings
from .sizing import estimate_bytes
from .store import Staging, Store
from .teachers import Teacher, read_teacher, resolve_path

POLL_S = 0.2
PROGRESS_S = 1.0
# loading makes no progress that could renew a lease; hundreds of gigabytes may come over a network
LOAD_S = 3600.0
# rows come in the order of their length and are held until their turn
BUFFER_BYTES = 256 * 2**20

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """The worker was told to end; its task is given back."""


class Progress:
    """Renews a lease from the loop that makes progress, at most once a second: a hung engine loses it."""

    def __init__(self, meta: Meta, lease: Lease, seconds: float, stop: Event) -> None:
        self._meta = meta
        self._lease = lease
        self._seconds = seconds
        self._stop = stop
        self._begin = self._last = time.monotonic()
        self.positions = 0
        self.activity: str | None = None

    @property
    def tokens_per_s(self) -> float:
        """Positions scored per second so far."""
        return self.positions / max(time.monotonic() - self._begin, 1e-9)

    def __call__(self, positions: int = 0) -> None:
        """Count positions; raises LeaseLost, Stopped."""
        self.positions += positions
        if self._stop.is_set():
            raise Stopped
        if time.monotonic() - self._last >= PROGRESS_S:
            self._last = time.monotonic()
            rate = self.tokens_per_s if self.positions else None
            self._meta.renew(self._lease, self._seconds, self.positions, rate, self.activity)


class Worker:
    """Works on the tasks of one data directory until `stop` is set or nothing was to be done for a while."""

    def __init__(
        self, settings: Settings, store: Store, meta: Meta, stop: Event, load: Callable[..., Engine] = load_engine
    ) -> None:
        self.owner = owner_of(os.getpid())
        self._settings = settings
        self._store = store
        self._meta = meta
        self._stop = stop
        self._load = load
        self._tokens = TokenFiles()
        self._loaded: tuple[Teacher, Engine] | None = None
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="finish")
        self._finishing: Future[None] | None = None

    def run(self) -> None:
        """Work, and return when idle for `idle_seconds` or stopped."""
        try:
            self._work()
        finally:
            self._wait()
            self._unload()
            self._tokens.close()

    def _work(self) -> None:
        idle_since = time.monotonic()
        while not self._stop.is_set():
            if self._begin():
                idle_since = time.monotonic()
                continue
            self._wait()
            if time.monotonic() - idle_since >= self._settings.idle_seconds:
                _log.info("nothing to do for %s s, ending", self._settings.idle_seconds)
                return
            self._stop.wait(POLL_S)

    def step(self) -> bool:
        """Work on one task to its end; return whether there was one."""
        found = self._begin()
        self._wait()
        return found

    def _begin(self) -> bool:
        """Work on a task until the teacher is free for the next one; return whether there was one."""
        lease = self._meta.lease(self.owner, self._settings.lease_seconds)
        if lease is None:
            return False
        _log.info("request %s: %s", lease.request.id[:12], _what(lease))
        self._guard(lease, self._plan if lease.number == PLAN else self._score)
        return True

    def _wait(self) -> None:
        """Wait for the shard that is being finished."""
        if self._finishing is not None:
            self._finishing.result()
            self._finishing = None

    def _guard(self, lease: Lease, work: Callable[[Lease], None]) -> None:
        """Work, and record what became of the task where that fails."""
        try:
            work(lease)
        except Stopped:
            self._meta.release(lease)
        except LeaseLost as error:
            _log.warning("%s", error)
        except EngineDied as error:
            _log.error("request %s: %s; it is loaded again", lease.request.id[:12], error)
            self._unload()
            self._meta.release(lease, f"{type(error).__name__}: {error}")
        except TeachercacheError as error:
            if type(error) is EngineError:
                # of one sequence, perhaps: it costs an attempt
                _log.error("request %s, %s: %s", lease.request.id[:12], _what(lease), error)
                self._meta.release(lease, str(error))
                return
            _log.error("request %s failed: %s", lease.request.id[:12], error)
            self._meta.fail(lease, Failure(error.code, str(error)))
        # anything else may pass, such as memory that another program has taken: it costs an attempt
        except Exception as error:
            _log.exception("request %s: %s failed", lease.request.id[:12], _what(lease))
            self._meta.release(lease, f"{type(error).__name__}: {error}")

    def _plan(self, lease: Lease) -> None:
        spec = lease.request.spec
        teacher = self._teacher(lease.request)
        progress = self._progress(lease)
        dataset = checked_path(spec.data, self._store, self._meta)
        plan = make_plan(dataset, teacher.limits, spec.shard_positions, self._store, progress, spec.generate)
        self._meta.commit_plan(lease, plan, self._store.put)

    def _score(self, lease: Lease) -> None:
        spec, part = lease.request.spec, lease.range
        assert lease.request.tokens is not None
        try:
            tokens = checked_path(lease.request.tokens, self._store, self._meta)
        except CorruptBlob:
            # the data set is still there: it is planned again before this range is
            self._meta.release(lease)
            return
        # before the teacher works for nothing
        room = estimate_bytes(part.positions, spec)
        with ExitStack() as stack:
            staging = stack.enter_context(self._store.stage(room))
            teacher, engine = self._engine(lease)
            fingerprint = engine.fingerprint(teacher.digest, teacher.tokenizer)
            _check_promise(spec, teacher, fingerprint)
            self._meta.adopt_fingerprint(lease, fingerprint)
            progress, tally = self._progress(lease), QualityTally()
            header = ShardMetadata(fingerprint, spec.k, spec.tail_samples, spec.profile)
            writer = ShardWriter(cast(BinaryIO, staging), header)
            self._meta.reach(lease, -1)
            examples = self._tokens.read(tokens, lease.number)
            if spec.generate is not None:
                progress.activity = f"generating from {part.sequences} prompts"
                examples = complete(engine, examples, part.first, spec, progress)
                progress.activity = None
            for sequence in self._sequences(lease, engine, examples, progress):
                writer.add(sequence)
                tally.add(sequence.rows)
            if is_audited(lease.number):
                writer.finish()
                with closing(Shard.open(staging.written())) as shard:
                    tally.audit = audit_shard(shard, engine, progress)
                check(tally.audit)
                self._commit(lease, staging, writer.num_positions, tally, progress)
                return
            # the teacher goes on while this shard is encoded; one at a time, as each is held in memory
            self._wait()
            held = stack.pop_all()

        def finish(lease: Lease) -> None:
            with held:
                writer.finish()
                self._commit(lease, staging, writer.num_positions, tally, progress)

        self._finishing = self._finisher.submit(self._guard, lease, finish)

    def _sequences(
        self, lease: Lease, engine: Engine, examples: list[Example], progress: Progress
    ) -> Iterator[ScoredSequence]:
        """Yield the scored sequences of a range, of an isolated one each by itself."""
        spec = lease.request.spec
        if not lease.isolated:
            yield from score_in_order(engine, examples, spec, progress)
            return
        for number, example in enumerate(examples):
            if number in lease.skipped:
                rows = absent_rows(num_tokens(example) - 1, spec, plain=not engine.draws_tail_samples)
                yield ScoredSequence(token_ids(example).astype("int32"), rows, example.loss_mask)
                continue
            self._meta.reach(lease, number)
            yield from score_in_order(engine, [example], spec, progress)

    def _commit(self, lease: Lease, staging: Staging, positions: int, tally: QualityTally, progress: Progress) -> None:
        blob, part = staging.commit(), lease.range
        descriptor = ShardDescriptor(blob.digest, blob.bytes, part.first, part.sequences, positions)
        committed = CommittedShard(descriptor, tally.to_json())
        self._meta.commit_shard(lease, committed, progress.tokens_per_s, self._store.put)

    def _progress(self, lease: Lease) -> Progress:
        return Progress(self._meta, lease, self._settings.lease_seconds, self._stop)

    def _teacher(self, request: RequestRow) -> Teacher:
        """Return the teacher of a request as its files are now; raises UnknownTeacher when they have changed."""
        settings = self._settings
        # the one of that name first: another that is broken need not be looked at
        for name in sorted(settings.teachers, key=lambda name: name != request.teacher_name):
            path = resolve_path(settings.teachers[name])
            teacher = read_teacher(name, path, settings.choice, self._meta.file_digest)
            if teacher.digest == request.spec.teacher:
                return teacher
        raise UnknownTeacher(
            f"teacher {request.teacher_name!r} ({request.spec.teacher}) is no longer served, or its files have changed"
        )

    def _engine(self, lease: Lease) -> tuple[Teacher, Engine]:
        """Return the engine with the teacher of a request, loading it unless it is the one that was used last."""
        if self._loaded is None or self._loaded[0].digest != lease.request.spec.teacher:
            # the old teacher leaves memory before the new one comes
            self._unload()
            teacher = self._teacher(lease.request)
            self._meta.renew(lease, LOAD_S, activity=f"loading {teacher.name} into {teacher.engine}")
            _log.info("loading %s into %s", teacher.path, teacher.engine)
            dtypes = {"dtype": teacher.dtype, "head_dtype": teacher.head_dtype}
            engine = self._load(teacher.engine, teacher.path, **dtypes, **self._settings.choice.options())
            self._loaded = teacher, engine
            self._meta.renew(lease, self._settings.lease_seconds)
        return self._loaded

    def _unload(self) -> None:
        if self._loaded is not None:
            (_, engine), self._loaded = self._loaded, None
            engine.close()


def score_in_order(
    engine: Engine, examples: list[Example], spec: CacheRequest, progress: Callable[[int], None]
) -> Iterator[ScoredSequence]:
    """Yield scored sequences in the order given; an engine gives them in an order of its own.

    The rows held back stay below `BUFFER_BYTES`, by scoring a wide range in several blocks.
    """
    row_bytes = 8 * spec.k + 4 * spec.tail_samples + 12
    for block in cut(examples, BUFFER_BYTES // row_bytes):
        ids = [token_ids(example) for example in block]
        done = {}
        for index, rows in engine.score(
            ids, k=spec.k, tail_samples=spec.tail_samples, seed=spec.seed, min_prob=float(spec.min_prob)
        ):
            done[index] = rows
            progress(num_tokens(block[index]))
        for index, example in enumerate(block):
            yield ScoredSequence(ids[index].astype("int32"), done.pop(index), example.loss_mask)


def absent_rows(count: int, spec: CacheRequest, *, plain: bool) -> Rows:
    """Return the rows of a sequence that could not be scored, with the columns of an engine's other rows."""
    column = np.full(count, -np.inf, np.float32)
    return Rows(
        token_ids_PK=np.full((count, spec.k), PAD_ID, np.int32),
        logprobs_PK=np.full((count, spec.k), -np.inf, np.float32),
        log_tail_mass_P=column,
        logsumexp_P=None if plain else np.zeros(count, np.float32),
        entropy_P=None if plain else np.zeros(count, np.float32),
        tail_token_ids_PN=np.full((count, spec.tail_samples), PAD_ID, np.int32) if spec.tail_samples else None,
    )


def _check_promise(spec: CacheRequest, teacher: Teacher, fingerprint: Fingerprint) -> None:
    """Refuse an engine that turns out to be something else than the request says."""
    for name, promised, found in (
        ("vocab_size", teacher.vocab_size, fingerprint.vocab_size),
        ("engine", spec.engine, fingerprint.engine),
        ("dtype", spec.dtype, fingerprint.dtype),
        ("head_dtype", spec.head_dtype, fingerprint.head_dtype),
    ):
        if promised != found:
            raise UnsupportedTeacher(
                f"teacher {teacher.name!r} runs with {name} {found} here, and the request was made for {promised}"
            )


def _what(lease: Lease) -> str:
    return "plan" if lease.number == PLAN else f"range {lease.number}"
