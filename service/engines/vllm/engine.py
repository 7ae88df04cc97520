"""The engine: sequences go into vLLM's own queue, a bounded number of tokens at a time, and come back as rows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from ....format_spec import Code, Fingerprint, Generation, Rows
from ...errors import UnsupportedTeacher
from ..errors import EngineDied, EngineError, InvalidSetting
from ..sequences import Ids, check_sequences
from ..stop_ids import stop_ids
from .front import FlatPath, HookPath, Wanted, keep_arrays
from .options import arguments, set_environment

DTYPES = ("float32", "bfloat16", "float16")
PATHS = {"hook": HookPath, "flat": FlatPath}
# as many tokens are with vLLM as it works on in so many steps
STEPS_IN_FLIGHT = 6
# a start loads weights and compiles; a sequence waits for those before it
START_SECONDS, STALL_SECONDS = 3600.0, 600.0
CLOSE_SECONDS, KILL_SECONDS = 60.0, 10.0
# an engine that said nothing for so long must first answer a small request, in as much time
CANARY_SECONDS = 60.0
PROBE_TOKENS = 24
PROBE_K = 8
# the two paths differ by float32 sums in another order
TOLERANCE = 1e-3
# where one of them rounds logits to 16 bits
ROUNDED_TOLERANCE = 0.2

_log = logging.getLogger(__name__)
T = TypeVar("T")


class VllmEngine:
    """A teacher in vLLM, on a CPU or on GPUs, in processes of vLLM's own.

    `engine_args` are settings of vLLM by its names; those that right rows need are refused. `capture_path` is "hook"
    (our code in vLLM's workers: all columns), "flat" (vLLM's public API: plain top-k) or "auto", the first where it
    gives what the second gives. A sequence that vLLM does not answer in `stall_seconds` counts as vLLM's death.

    Raises:
        InvalidSetting: an unknown dtype or path, or a setting that is not the user's.
        UnsupportedTeacher: vLLM does not run it.
        EngineDied: vLLM did not start, perhaps for want of memory.
    """

    name = "vllm"

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        head_dtype: str = "float32",
        capture_path: str = "auto",
        engine_args: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        if dtype not in DTYPES or head_dtype not in {"float32", dtype}:
            raise InvalidSetting(
                f"dtype {dtype!r} and head {head_dtype!r} are not one of {list(DTYPES)}, and float32 or it"
            )
        if capture_path not in ("auto", *PATHS):
            raise InvalidSetting(f"capture_path {capture_path!r} is not one of {['auto', *PATHS]}")
        self._dtype, self._head_dtype, self._given = dtype, head_dtype, dict(engine_args or {})
        self._stall_seconds, self._model_path = stall_seconds, Path(path)
        self._on_gpu = torch.cuda.is_available()
        args = arguments(path, dtype=dtype, head_dtype=head_dtype, given=self._given, on_gpu=self._on_gpu)
        set_environment(on_gpu=self._on_gpu)
        keep_arrays()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._llm: Any = None
        self._processes: list[psutil.Process] = []
        self._number, self._answered = 0, 0.0
        begin, before = time.monotonic(), set(multiprocessing.active_children())
        try:
            try:
                self._llm = self._run(_start(args), START_SECONDS)
            finally:
                self._processes = _started_since(before)
            _log.info("vLLM %s has loaded %s in %.0f s", vllm.__version__, path, time.monotonic() - begin)
            self._read_config()
            self._found = self._install()
            self._path = self._choose(capture_path)
        except BaseException:
            self.close()
            raise
        _log.info("vLLM is ready after %.0f s: %s", time.monotonic() - begin, self._kernel())

    @property
    def draws_tail_samples(self) -> bool:
        """Whether rows can have tail samples."""
        return self._path.draws_tail_samples

    def fingerprint(self, teacher: str, tokenizer: str) -> Fingerprint:
        """Return who produces the numbers, given the digests of the teacher and of its tokenizer."""
        return Fingerprint(
            teacher=teacher,
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            engine=self.name,
            dtype=self._dtype,
            head_dtype=self._head_dtype,
            device="cuda" if self._on_gpu else "cpu",
            kernel=self._kernel(),
            software={"torch": torch.__version__, "vllm": vllm.__version__},
        )

    def score(
        self, sequences: Sequence[Ids], *, k: int, tail_samples: int, seed: int, min_prob: float = 0.0
    ) -> Iterator[tuple[int, Rows]]:
        """Yield each sequence's number and rows, from short to long; see `Engine.score`.

        What was computed together depends on time, so rows repeat within the rounding of the teacher's dtype only.

        Raises:
            EngineDied: vLLM's processes ended, or gave nothing for long; load the engine again.
        """
        if not 1 <= k <= self.vocab_size:
            raise InvalidSetting(
                f"k {k} is outside 1 .. {self.vocab_size}, the teacher's vocabulary", Code.K_OUT_OF_RANGE
            )
        if tail_samples < 0:
            raise InvalidSetting(f"tail_samples {tail_samples} is negative")
        if tail_samples and not self.draws_tail_samples:
            raise InvalidSetting(
                f"vLLM runs without our hook (path {self._path.name}), and cannot draw tail samples: ask for 0",
                Code.TAIL_SAMPLES_UNAVAILABLE,
            )
        if not 0 <= min_prob <= 1:
            raise InvalidSetting(f"min_prob {min_prob} is outside 0 .. 1")
        check_sequences(sequences, num_embeddings=self.vocab_size, max_length=self.max_length)
        wanted = Wanted(k, tail_samples, seed, min_prob)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        return self._each(
            [(index, len(sequences[index])) for index in order],
            STEPS_IN_FLIGHT * self._batched_tokens,
            lambda index: self._one(self._path, sequences[index], wanted),
        )

    def generate(
        self, prompts: Sequence[Ids], settings: Generation, seeds: Sequence[int]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield each prompt's number and completion, in the order given; see `Engine.generate`.

        On a CPU draws follow no seed.
        """
        stop = stop_ids(self._model_path)

        def work(index: int) -> Coroutine[Any, Any, npt.NDArray[np.int64]]:
            params = SamplingParams(
                max_tokens=settings.room(len(prompts[index]), self.max_length),
                temperature=float(settings.temperature),
                top_p=float(settings.top_p),
                # on a CPU vLLM dies of seeded requests whose prompts come in parts: a generator cannot go back there
                seed=seeds[index] if self._on_gpu else None,
                stop_token_ids=stop,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            return self._completion(prompts[index], params)

        # some wait while others are generated, so that a step is full
        return self._each([(index, 1) for index in range(len(prompts))], 2 * self._max_sequences, work)

    def close(self) -> None:
        """End vLLM's processes, by force where they do not end; does nothing twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._submit(self._end()).result(CLOSE_SECONDS)
        except TimeoutError:
            _log.warning("vLLM does not end in %.0f s: killing it", CLOSE_SECONDS)
        # also what a killed engine left running, which holds the memory that the next one needs
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes, KILL_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(KILL_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        # its finaliser fails at the end of the interpreter
        self._llm = None

    async def _end(self) -> None:
        """On the loop, as what is shut down has tasks there."""
        if self._llm is not None:
            self._llm.shutdown()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _read_config(self) -> None:
        config = self._llm.vllm_config
        self.vocab_size = int(config.model_config.get_vocab_size())
        # the last token of a sequence is not sent, and vLLM wants room for one more than it gets
        self.max_length = int(config.model_config.max_model_len)
        self._batched_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self._max_sequences = int(config.scheduler_config.max_num_seqs)

    def _install(self) -> dict[str, Any]:
        """Return what the worker that answers says of itself."""
        given = os.getpid(), self._head_dtype
        try:
            found: list[dict[str, Any]] = self._run(self._llm.collective_rpc("teachercache_install", args=given))
        except Exception as error:
            if isinstance(error, EngineDied):
                raise
            raise UnsupportedTeacher(f"vLLM's worker takes no hook: {_said(error)}") from error
        return found[-1]

    def _choose(self, capture_path: str) -> HookPath | FlatPath:
        """Return the path to take, after both have scored the same."""
        if capture_path == "flat":
            return self._flat()
        ids = np.arange(min(PROBE_TOKENS, self.max_length), dtype=np.int32) * 7 % self.vocab_size
        wanted = Wanted(min(PROBE_K, self.vocab_size), 0, 0, 0.0)
        try:
            hook, flat = (self._run(self._one(path, ids, wanted)) for path in (HookPath(), FlatPath()))
            worst = float(np.abs(hook.logprobs_PK - flat.logprobs_PK).max())
            if not worst <= (ROUNDED_TOLERANCE if self._found["own_head"] else TOLERANCE):
                raise EngineError(f"its logprobs differ by {worst:.2g} from those of vLLM's public API")
        except EngineError as error:
            if capture_path == "hook" or isinstance(error, EngineDied):
                raise
            _log.warning("vLLM runs without our hook, rows are plain top-k and slower: %s", error)
            return self._flat()
        return HookPath()

    def _flat(self) -> FlatPath:
        if self._found["own_head"]:
            raise UnsupportedTeacher(
                f"vLLM {vllm.__version__} computes this teacher's logits in {self._found['logits']}, and path flat has "
                f"no others: ask for --head-dtype auto"
            )
        return FlatPath()

    def _kernel(self) -> str:
        config = self._llm.vllm_config
        facts = {
            "path": self._path.name,
            "runner": self._found["runner"],
            "head": "ours" if self._found["own_head"] else "vllm",
            "batched": self._batched_tokens,
            "quantization": config.model_config.quantization or "none",
            **{name: self._given[name] for name in sorted(self._given)},
        }
        return " ".join(f"{name}={value}" for name, value in facts.items())

    def _each(
        self, jobs: Sequence[tuple[int, int]], room: int, work: Callable[[int], Coroutine[Any, Any, T]]
    ) -> Iterator[tuple[int, T]]:
        """Yield the number of each job, given as (number, size), and what its work returns, in the order of the jobs.

        Jobs of at most `room` are under way, and one at the least.
        """
        self._check_health()
        waiting = deque(jobs)
        sent: deque[tuple[int, int, Future[T]]] = deque()
        try:
            while waiting or sent:
                # nothing is sent while the rows that are there are not taken
                while waiting and (not sent or room >= waiting[0][1]):
                    index, size = waiting.popleft()
                    room -= size
                    sent.append((index, size, self._submit(work(index))))
                index, size, future = sent[0]
                done = self._result(future, self._stall_seconds)
                sent.popleft()
                room += size
                yield index, done
        finally:
            for _, _, future in sent:
                future.cancel()

    async def _one(self, path: HookPath | FlatPath, ids: Ids, wanted: Wanted) -> Rows:
        return path.rows(await self._answer(path.prompt(ids), path.params(ids, wanted)), ids, wanted)

    async def _completion(self, ids: Ids, params: SamplingParams) -> npt.NDArray[np.int64]:
        answer = await self._answer(ids.tolist(), params)
        return np.asarray(answer.outputs[0].token_ids, np.int64)

    async def _answer(self, ids: list[int], params: SamplingParams) -> Any:
        self._number += 1
        output = None
        try:
            async for answer in self._llm.generate({"prompt_token_ids": ids}, params, str(self._number)):
                output = answer
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's engine ended: {error}") from error
        except ValueError as error:
            raise EngineError(f"vLLM refused a sequence of {len(ids)} tokens: {error}") from error
        if output is None or not output.finished:
            raise EngineError(f"vLLM gave no answer for a sequence of {len(ids)} tokens")
        self._answered = time.monotonic()
        return output

    def _check_health(self) -> None:
        """Raise EngineDied when vLLM has said nothing for long, and does not answer a small request either."""
        if time.monotonic() - self._answered > CANARY_SECONDS:
            ids = np.arange(min(PROBE_TOKENS, self.max_length), dtype=np.int32) % self.vocab_size
            self._run(self._one(self._path, ids, Wanted(1, 0, 0, 0.0)), CANARY_SECONDS)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T], seconds: float = STALL_SECONDS) -> T:
        return self._result(self._submit(work), seconds)

    def _result(self, future: Future[T], seconds: float) -> T:
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()
            raise EngineDied(f"vLLM gave nothing for {seconds:.0f} s") from error


async def _start(args: dict[str, Any]) -> Any:
    """vLLM starts tasks of its own on the loop that it is made on."""
    try:
        engine_args = AsyncEngineArgs(**args)
    except TypeError as error:
        raise InvalidSetting(f"vLLM {vllm.__version__} does not take these settings: {error}") from error
    try:
        config = engine_args.create_engine_config()
    except (ValueError, NotImplementedError, OSError) as error:
        raise UnsupportedTeacher(f"vLLM cannot run this teacher: {_said(error)}") from error
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    # what it is, only the log of vLLM's own process says; memory that another program has taken may come back
    except Exception as error:
        raise EngineDied(f"vLLM did not start: {_said(error)}") from error


def _started_since(before: set[Any]) -> list[psutil.Process]:
    """Return the children of this process that were not there before, and theirs, which may outlive them."""
    found: list[psutil.Process] = []
    for child in set(multiprocessing.active_children()) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child.pid)
            found += [process, *process.children(recursive=True)]
    return found


def _said(error: BaseException) -> str:
    return str(error).strip()[:500] or type(error).__name__
