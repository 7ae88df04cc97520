"""What a request to vLLM asks for, and how its answer becomes rows: by our hook in the workers, or by the public API.

Shapes: L tokens of a sequence, P = L - 1 rows, K kept entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor

from ....format_spec import Rows, content_key
from ..errors import EngineError
from ..plain_rows import plain_rows
from .hook import ASK
from .packing import unpack


class Wanted(NamedTuple):
    """What every row of a call holds."""

    k: int
    tail_samples: int
    seed: int
    min_prob: float


class Packed:
    """What the hook sent, kept as it came."""

    def __init__(self, ids: npt.NDArray[Any], floats: npt.NDArray[Any]) -> None:
        self.ids, self.floats = ids, floats

    def __len__(self) -> int:
        return len(self.ids)


class PackedProcessor(LogprobsProcessor):  # type: ignore[misc]
    """Keeps the arrays of our requests; vLLM would make a Python object of every entry."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        """vLLM's factory: the processor of a new request."""
        params = request.sampling_params
        if (params.extra_args or {}).get(ASK) is None:
            return LogprobsProcessor.from_new_request(tokenizer, request)
        return cls(
            tokenizer=None,
            cumulative_logprob=None,
            logprobs=None,
            prompt_logprobs=None,
            num_prompt_logprobs=params.prompt_logprobs,
            num_logprobs=None,
        )

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: Any) -> None:
        ids, floats, *_ = prompt_logprobs_tensors
        # copied: vLLM's tensors are views of the message that brought them
        self.prompt_logprobs = Packed(np.array(ids.numpy()), np.array(floats.numpy()))


def keep_arrays() -> None:
    """Make vLLM's front end in this process keep the arrays of our requests, and no others."""
    output_processor.LogprobsProcessor = PackedProcessor


class HookPath:
    """All columns, computed in the worker."""

    name = "hook"
    draws_tail_samples = True

    def prompt(self, ids: npt.NDArray[Any]) -> list[int]:
        """The last token has no row, and what it predicts is not asked for."""
        prompt: list[int] = ids[:-1].tolist()
        return prompt

    def params(self, ids: npt.NDArray[Any], wanted: Wanted) -> SamplingParams:
        """What vLLM is told."""
        ask = wanted._asdict() | {"key": content_key(ids.astype(np.int32)).hex()}
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={ASK: ask},
        )

    def rows(self, output: Any, ids: npt.NDArray[Any], wanted: Wanted) -> Rows:
        """Read the answer."""
        packed = output.prompt_logprobs
        if not isinstance(packed, Packed):
            raise EngineError(f"vLLM answered with {type(packed).__name__}, not with the hook's arrays")
        return unpack(packed.ids, packed.floats, num_rows=len(ids) - 1, k=wanted.k, tail_samples=wanted.tail_samples)


class FlatPath:
    """Plain top-k by vLLM's public API: what remains where the hook cannot run."""

    name = "flat"
    draws_tail_samples = False

    def prompt(self, ids: npt.NDArray[Any]) -> list[int]:
        """The same tokens as on the other path; the last row comes with the token that vLLM generates."""
        prompt: list[int] = ids[:-1].tolist()
        return prompt

    def params(self, ids: npt.NDArray[Any], wanted: Wanted) -> SamplingParams:
        """What vLLM is told."""
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=wanted.k,
            logprobs=wanted.k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def rows(self, output: Any, ids: npt.NDArray[Any], wanted: Wanted) -> Rows:
        """Read the answer: each position has the token itself and then the top k."""
        parts = [output.prompt_logprobs, output.outputs[0].logprobs]
        token_ids = np.concatenate([np.asarray(part.token_ids, np.int32) for part in parts])
        logprobs = np.concatenate([np.asarray(part.logprobs, np.float32) for part in parts])
        shape = len(ids) - 1, wanted.k + 1
        if token_ids.size != shape[0] * shape[1]:
            raise EngineError(f"vLLM gave {token_ids.size} logprobs for {shape[0]} rows of the token and {wanted.k}")
        token_ids_PK, logprobs_PK = token_ids.reshape(shape)[:, 1:], logprobs.reshape(shape)[:, 1:]
        return plain_rows(token_ids_PK, logprobs_PK, wanted.min_prob)
