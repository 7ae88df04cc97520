"""What runs in vLLM's workers: rows from the logits of prompts, in the place of vLLM's prompt logprobs.

A request that carries an `Ask` gets a row for each position of its prompt, the last one included. Both of vLLM's model
runners are served; `Capture` is what they share. Shapes: T tokens of a step, D hidden size, P positions, V vocabulary.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.outputs import LogprobsTensors

from ....format_spec import tail_uniforms
from ..capture import capture_columns
from .head import float32_head, logits_dtype
from .packing import pack, pack_failure

# of memory, for logits at a time: a GPU works best on many positions
CPU_LOGITS_BYTES = 2**28
GPU_LOGITS_SHARE = 1 / 32
ASK = "teachercache"

LogitsOf = Callable[[Tensor], Tensor]


class Settings(NamedTuple):
    """What a row holds."""

    k: int
    tail_samples: int
    min_prob: float


@dataclass
class Asked:
    """A request on its way: what it asked for, and its rows so far."""

    settings: Settings
    uniforms_P: npt.NDArray[np.float64]
    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def of(cls, sampling_params: Any, num_positions: int) -> Asked | None:
        """Read what a request carries, if it is one of ours."""
        ask = ((sampling_params and sampling_params.extra_args) or {}).get(ASK)
        if ask is None:
            return None
        uniforms_P = tail_uniforms(ask["seed"], bytes.fromhex(ask["key"]), num_positions)
        return cls(Settings(ask["k"], ask["tail_samples"], ask["min_prob"]), uniforms_P)


@dataclass(frozen=True, eq=False)
class Piece:
    """The positions of one prompt that a step computed: `count` from `begin`, in rows from `offset` of the step."""

    name: str
    asked: Asked
    begin: int
    count: int
    offset: int
    is_last: bool


class Capture:
    """Turns the hidden states of a step into rows, a bounded block of logits at a time."""

    def __init__(self, runner: Any, logits_of: LogitsOf) -> None:
        self._block = max(1, logits_bytes(runner.device) // (4 * runner.model_config.get_vocab_size()))
        self._logits_of = logits_of
        # every rank has all logits, and only the first one's answer is read
        self._answers = get_tensor_model_parallel_rank() == 0

    def step(self, pieces: Iterable[Piece], hidden_TD: Tensor) -> dict[str, LogprobsTensors]:
        """Add a step's rows to the requests; return those that are complete."""
        pieces = list(pieces)
        for settings in {piece.asked.settings for piece in pieces}:
            self._rows([piece for piece in pieces if piece.asked.settings == settings], hidden_TD)
        return {piece.name: self._finished(piece.asked) for piece in pieces if piece.is_last}

    def _rows(self, pieces: list[Piece], hidden_TD: Tensor) -> None:
        """The rows of pieces that ask for the same."""
        ranges = [np.arange(piece.offset, piece.offset + piece.count) for piece in pieces]
        places_P = torch.from_numpy(np.concatenate(ranges)).to(hidden_TD.device, non_blocking=True)
        parts = [piece.asked.uniforms_P[piece.begin : piece.begin + piece.count] for piece in pieces]
        uniforms_P = np.concatenate(parts)
        blocks, error = [], None
        for places_B, done in zip(places_P.split(self._block), range(0, len(uniforms_P), self._block), strict=True):
            try:
                # every rank has a part in this, whatever has become of the rows
                logits_BV = self._logits_of(hidden_TD[places_B])
                if self._answers and error is None:
                    uniforms_B = uniforms_P[done : done + len(places_B)]
                    blocks.append(_captured(logits_BV, uniforms_B, pieces[0].asked.settings))
            except Exception as failure:  # it would end vLLM; the request that asked is told instead
                error = error or f"{type(failure).__name__}: {failure}"
        if error or not self._answers:
            for piece in pieces:
                piece.asked.error = error
            return
        ids, floats = (torch.cat(column) if len(blocks) > 1 else column[0] for column in zip(*blocks, strict=True))
        counts = [piece.count for piece in pieces]
        for piece, *part in zip(pieces, ids.split(counts), floats.split(counts), strict=True):
            piece.asked.parts.append((part[0], part[1]))

    def _finished(self, asked: Asked) -> LogprobsTensors:
        if asked.error is not None or not asked.parts:
            packed = pack_failure(asked.error or "this rank does not answer")
        else:
            ids, floats = zip(*asked.parts, strict=True)
            packed = (torch.cat(ids), torch.cat(floats)) if len(ids) > 1 else (ids[0], floats[0])
        return LogprobsTensors(*packed, selected_token_ranks=torch.empty(0, dtype=torch.int32))


def logits_bytes(device: torch.device) -> int:
    """Return what logits may take on a device, beside what vLLM has taken."""
    if device.type != "cuda":
        return CPU_LOGITS_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory * GPU_LOGITS_SHARE)


def _captured(logits_BV: Tensor, uniforms_B: npt.NDArray[np.float64], settings: Settings) -> tuple[Tensor, Tensor]:
    return pack(capture_columns(logits_BV, uniforms_P=uniforms_B, **settings._asdict()))


class CaptureExtension:
    """Mixed into vLLM's worker; the method is called once, by `collective_rpc`, when the model is loaded."""

    def teachercache_install(self, owner: int, head_dtype: str) -> dict[str, Any]:
        """Take over the prompt logprobs of requests that ask for rows, with logits of this dtype.

        vLLM's processes end when the process `owner`, which started them, does, also by SIGKILL. What is returned
        says which model runner there is, the dtype of vLLM's own logits, and whether ours are vLLM's.
        """
        end_with(owner)
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        is_first = hasattr(runner, "_get_prompt_logprobs_dict")
        found = {"runner": "v1" if is_first else "v2", "logits": head_dtype, "own_head": False}
        # of a pipeline, only the last stage has logits
        if not get_pp_group().is_last_rank:
            return found
        found["logits"] = logits_dtype(runner)
        found["own_head"] = found["logits"] != head_dtype
        logits_of = float32_head(runner.model) if found["own_head"] else runner.model.compute_logits
        if is_first:
            V1Hook.install(runner, logits_of)
        else:
            runner.prompt_logprobs_worker = V2Hook(runner, logits_of)
        return found


def end_with(owner: int) -> None:
    """Watch the owner, a parent or its parent: vLLM's engine outlives it, and would keep its memory for ever."""
    parent = os.getppid()
    if owner not in (parent, _parent_of(parent)):
        # on another machine
        return
    watched = os.pidfd_open(owner)
    doomed = {parent, os.getpid()} - {owner}

    def wait() -> None:
        select.select([watched], [], [])
        for pid in sorted(doomed, key=os.getpid().__eq__):
            os.kill(pid, signal.SIGKILL)

    Thread(target=wait, name="end_with", daemon=True).start()


def _parent_of(pid: int) -> int:
    # the name, in brackets, may hold anything
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class V1Hook:
    """On vLLM's first model runner, which a CPU has."""

    def __init__(self, runner: Any, logits_of: LogitsOf) -> None:
        self._runner = runner
        self._own = runner._get_prompt_logprobs_dict
        self._capture = Capture(runner, logits_of)
        self._asked: dict[str, Asked] = {}

    @classmethod
    def install(cls, runner: Any, logits_of: LogitsOf) -> None:
        """Replace the runner's method."""
        hook = cls(runner, logits_of)

        def replacement(
            runner: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
        ) -> dict[str, LogprobsTensors | None]:
            return hook(hidden_states, num_scheduled_tokens)

        runner._get_prompt_logprobs_dict = MethodType(replacement, runner)

    def __call__(self, hidden_TD: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, LogprobsTensors | None]:
        """The method's arguments and result are vLLM's."""
        waiting = self._runner.num_prompt_logprobs
        pieces = list(self._pieces(waiting, num_scheduled_tokens))
        finished = self._capture.step(pieces, hidden_TD)
        on_cpu = {
            name: rows._replace(logprob_token_ids=rows.logprob_token_ids.cpu(), logprobs=rows.logprobs.cpu())
            for name, rows in finished.items()
        }
        for name in finished:
            del waiting[name], self._asked[name]
        # vLLM's own method works through all that wait, and must not see ours
        ours = {name: waiting.pop(name) for name in [name for name in waiting if name in self._asked]}
        try:
            others: dict[str, LogprobsTensors | None] = self._own(hidden_TD, num_scheduled_tokens)
        finally:
            waiting.update(ours)
        return others | on_cpu

    def _pieces(self, waiting: dict[str, int], num_scheduled_tokens: dict[str, int]) -> Iterator[Piece]:
        self._asked = {name: asked for name, asked in self._asked.items() if name in waiting}
        for name in waiting:
            request, count = self._runner.requests[name], num_scheduled_tokens.get(name)
            if count is None:
                continue
            length, begin = len(request.prompt_token_ids or ()), request.num_computed_tokens
            if begin == 0:
                # the first step, also after vLLM has thrown out the request and begun again
                asked = Asked.of(request.sampling_params, length)
                if asked is None:
                    continue
                self._asked[name] = asked
            elif name not in self._asked:
                continue
            offset = int(self._runner.query_start_loc.np[self._runner.input_batch.req_id_to_index[name]])
            count = min(count, length - begin)
            yield Piece(name, self._asked[name], begin, count, offset, begin + count == length)


class V2Hook:
    """On vLLM's second model runner, which a GPU has: stands in the place of its `PromptLogprobsWorker`."""

    def __init__(self, runner: Any, logits_of: LogitsOf) -> None:
        self._own = runner.prompt_logprobs_worker
        self._capture = Capture(runner, logits_of)
        self._params: dict[str, Any] = {}
        self._asked: dict[str, Asked] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        """Remember a request of ours; another is vLLM's."""
        self._asked.pop(req_id, None)
        if (sampling_params.extra_args or {}).get(ASK) is None:
            self._own.add_request(req_id, req_idx, sampling_params)
            return
        self._params[req_id] = sampling_params
        # the place may have been that of another request
        self._own.uses_prompt_logprobs[req_idx] = False

    def remove_request(self, req_id: str) -> None:
        """Forget a request, complete or not."""
        self._params.pop(req_id, None)
        self._asked.pop(req_id, None)
        self._own.remove_request(req_id)

    def compute_prompt_logprobs(
        self,
        logits_fn: LogitsOf,
        hidden_states: Tensor,
        input_batch: Any,
        all_token_ids: Tensor,
        num_computed_tokens: Tensor,
        prompt_lens: npt.NDArray[Any],
    ) -> dict[str, LogprobsTensors]:
        """The arguments and the result are vLLM's."""
        given = logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
        finished: dict[str, LogprobsTensors] = self._own.compute_prompt_logprobs(*given)
        pieces = list(self._pieces(input_batch, prompt_lens))
        return finished | self._capture.step(pieces, hidden_states)

    def _pieces(self, batch: Any, prompt_lens: npt.NDArray[Any]) -> Iterator[Piece]:
        for row, name in enumerate(batch.req_ids):
            if name not in self._params:
                continue
            length, begin = int(prompt_lens[batch.idx_mapping_np[row]]), int(batch.num_computed_prefill_tokens_np[row])
            if begin >= length:
                continue
            asked = self._asked.get(name)
            if asked is None:
                asked = Asked.of(self._params[name], length)
                assert asked is not None
                self._asked[name] = asked
            count = min(int(batch.num_scheduled_tokens[row]), length - begin)
            offset = int(batch.query_start_loc_np[row])
            yield Piece(name, asked, begin, count, offset, begin + count == length)
