"""Two processes that share a process group, and run what a test sends them."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RANKS = 2
# Seconds that ranks wait for one another, and the test for them: beyond any start on a busy machine.
PATIENCE = 180


class Ranks:
    """The two of them: started by the first call, and anew by the next one after a failure."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts = folder, 0
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []

    def run(self, work: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
        """What `work(rank, ...)` returns on each rank.

        Raises:
            AssertionError: a rank raised, with its traceback, or did not answer.
        """
        if not self._ends:
            self._start()
        for end in self._ends:
            end.send_bytes(pickle.dumps((work, given, named)))
        answers: dict[int, Any] = {}
        while len(answers) < RANKS:
            ready = wait([end for rank, end in enumerate(self._ends) if rank not in answers], PATIENCE)
            failure = None if ready else f"no answer in {PATIENCE} s"
            for end in ready:
                assert isinstance(end, Connection)
                failed, answer = pickle.loads(end.recv_bytes())
                failure = failure or failed
                answers[self._ends.index(end)] = answer
            if failure is not None:
                # The other may wait for this one: neither can be used again.
                self.stop()
                raise AssertionError(failure)
        return [answers[rank] for rank in range(RANKS)]

    def stop(self) -> None:
        """End the processes."""
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.kill()
            process.join()
        self._ends, self._processes = [], []

    def _start(self) -> None:
        context = get_context("spawn")
        self._starts += 1
        for rank in range(RANKS):
            here, there = context.Pipe()
            store = str(self._folder / f"store-{self._starts}")
            process = context.Process(target=_serve, args=(rank, store, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)


def _serve(rank: int, store: str, end: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    while True:
        work, given, named = pickle.loads(end.recv_bytes())
        try:
            answer = None, work(rank, *given, **named)
        except Exception:
            answer = f"rank {rank}: {traceback.format_exc()}", None
        # By value: shared memory would end with this process.
        end.send_bytes(pickle.dumps(answer))
