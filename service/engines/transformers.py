"""The engine that runs a teacher with Hugging Face transformers, on a CPU or one GPU.

Shapes: B sequences of a batch, L tokens of the longest, D hidden size, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from ...format_spec import Code, Fingerprint, Generation, Rows, content_key, tail_uniforms
from ...format_spec.constants import MAX_SEQUENCE_POSITIONS
from ..errors import UnsupportedTeacher
from .capture import capture
from .errors import EngineError, InvalidSetting
from .head import separate_head
from .sequences import BATCHING_VERSION, Ids, check_sequences, pad_batch, plan_batches
from .stop_ids import stop_ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# a CPU shows progress every few seconds; a GPU wants more work at a time
MAX_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
LOGITS_BYTES = 512 * 2**20
PROBE_TOKENS = 8

ToRows = Callable[..., Rows]


class TransformersEngine:
    """A causal language model from a local directory or the hub, with safetensors weights and no code of its own.

    `device` "auto" is the GPU where there is one. A batch holds at most `max_batch_tokens` tokens with padding.
    Logits are float32, for at most `LOGITS_BYTES` of positions at once; a model whose head cannot be run apart
    from its body gives a batch's at once, in its own dtype, and the batches are bounded by that instead.
    Threads, matmul precision and the random state stay as the process has set them.

    Raises:
        InvalidSetting: unknown dtype or device, or no room for a token in a batch.
        UnsupportedTeacher: the model cannot be loaded whole, or is not causal.
    """

    name = "transformers"
    draws_tail_samples = True

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        head_dtype: str = "float32",
        device: str = "auto",
        max_batch_tokens: int | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise InvalidSetting(f"dtype {dtype!r} is not one of {list(DTYPES)}")
        if head_dtype != "float32":
            raise InvalidSetting(f"head_dtype {head_dtype!r} is not float32, what logits are computed in here")
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise InvalidSetting(f"max_batch_tokens {max_batch_tokens} is not a positive number")
        self._device = _device(device)
        self._dtype = dtype
        self._max_batch_tokens = max_batch_tokens or MAX_BATCH_TOKENS[self._device.type]
        self._path = Path(path)
        self._model = _load(path, DTYPES[dtype]).to(self._device).eval()
        # what a teacher's folder says of sampling must not enter; settings come with the request
        self._model.generation_config = transformers.GenerationConfig()
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = int(limit or MAX_SEQUENCE_POSITIONS)
        self._num_embeddings = int(self._model.get_input_embeddings().num_embeddings)
        probe_BL = (torch.arange(min(PROBE_TOKENS, self.max_length), device=self._device) % self._num_embeddings)[None]
        with torch.inference_mode():
            self.vocab_size = _check_causal(self._model, probe_BL, self._num_embeddings)
            self._head = separate_head(self._model, probe_BL)

    def fingerprint(self, teacher: str, tokenizer: str) -> Fingerprint:
        """Return who produces the numbers, given the digests of the teacher and of its tokenizer."""
        kernel = {
            "attention": self._model.config._attn_implementation,
            "head": "whole" if self._head is None else "apart",
            "matmul": torch.get_float32_matmul_precision(),
            "batching": f"{BATCHING_VERSION}/{self._max_batch_tokens}",
        }
        return Fingerprint(
            teacher=teacher,
            tokenizer=tokenizer,
            vocab_size=self.vocab_size,
            engine=self.name,
            dtype=self._dtype,
            head_dtype=self._dtype if self._head is None else "float32",
            device=self._device.type,
            kernel=" ".join(f"{name}={value}" for name, value in kernel.items()),
            software={"torch": torch.__version__, "transformers": transformers.__version__},
        )

    def score(
        self, sequences: Sequence[Ids], *, k: int, tail_samples: int, seed: int, min_prob: float = 0.0
    ) -> Iterator[tuple[int, Rows]]:
        """Yield each sequence's number and rows, from short to long; see `Engine.score`."""
        if not 1 <= k <= self.vocab_size:
            raise InvalidSetting(
                f"k {k} is outside 1 .. {self.vocab_size}, the teacher's vocabulary", Code.K_OUT_OF_RANGE
            )
        if tail_samples < 0:
            raise InvalidSetting(f"tail_samples {tail_samples} is negative")
        if not 0 <= min_prob <= 1:
            raise InvalidSetting(f"min_prob {min_prob} is outside 0 .. 1")
        check_sequences(sequences, num_embeddings=self._num_embeddings, max_length=self.max_length)
        return self._score(sequences, partial(capture, k=k, tail_samples=tail_samples, min_prob=min_prob), seed)

    def generate(
        self, prompts: Sequence[Ids], settings: Generation, seeds: Sequence[int]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield each prompt's number and completion, one after the other; see `Engine.generate`."""
        stop = stop_ids(self._path) or None
        temperature = float(settings.temperature)
        drawing = {"temperature": temperature, "top_p": float(settings.top_p), "top_k": 0} if temperature else {}
        for index, (ids, seed) in enumerate(zip(prompts, seeds, strict=True)):
            config = transformers.GenerationConfig(
                max_new_tokens=settings.room(len(ids), self.max_length),
                do_sample=bool(temperature),
                eos_token_id=stop,
                pad_token_id=stop[0] if stop else 0,
                **drawing,
            )
            prompt_BL = torch.from_numpy(np.asarray(ids, np.int64))[None].to(self._device)
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.inference_mode(), torch.random.fork_rng(devices):
                torch.manual_seed(seed)
                whole_BL = self._model.generate(
                    prompt_BL, attention_mask=torch.ones_like(prompt_BL), generation_config=config
                )
            yield index, whole_BL[0, len(ids) :].cpu().numpy()

    def close(self) -> None:
        """Nothing runs beside the process itself."""

    def _score(self, sequences: Sequence[Ids], to_rows: ToRows, seed: int) -> Iterator[tuple[int, Rows]]:
        max_tokens = self._max_batch_tokens
        if self._head is None:
            max_tokens = min(max_tokens, LOGITS_BYTES // (4 * self.vocab_size))
        for batch in plan_batches([len(ids) for ids in sequences], max_tokens):
            chosen = [sequences[index] for index in batch]
            yield from zip(batch, self._score_batch(chosen, to_rows, seed), strict=True)

    def _score_batch(self, sequences: Sequence[Ids], to_rows: ToRows, seed: int) -> list[Rows]:
        counts = [len(ids) - 1 for ids in sequences]
        uniforms_P = np.concatenate(
            [tail_uniforms(seed, content_key(ids), count) for ids, count in zip(sequences, counts, strict=True)]
        )
        parts: list[Rows] = []
        done = 0
        with torch.inference_mode():
            for logits_PV in self._logits(sequences):
                parts.append(to_rows(logits_PV, uniforms_P=uniforms_P[done : done + len(logits_PV)]))
                done += len(logits_PV)
        if done != sum(counts):
            raise EngineError(f"the model gave {done} rows for a batch that has {sum(counts)}")
        rows = Rows.concatenate(parts)
        ends = np.cumsum(counts).tolist()
        return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _logits(self, sequences: Sequence[Ids]) -> Iterator[Tensor]:
        """Yield the logits [P, V] of the sequences' rows, one sequence after the other, in blocks."""
        ids, mask = (torch.from_numpy(array).to(self._device) for array in pad_batch(sequences))
        if self._head is None:
            logits_BLV = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for logits_LV, sequence in zip(logits_BLV, sequences, strict=True):
                yield logits_LV[: len(sequence) - 1]
            return
        body = self._model.base_model
        hidden_BLD = body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        # position i has a row when token i + 1 exists
        hidden_PD = hidden_BLD[:, :-1][mask[:, 1:].bool()]
        for block_PD in hidden_PD.split(max(1, LOGITS_BYTES // (4 * self.vocab_size))):
            yield self._head(block_PD)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidSetting(f"device {name!r} is not one that torch knows") from error
    if device.type not in MAX_BATCH_TOKENS:
        raise InvalidSetting(f"device {name!r} is not one of {list(MAX_BATCH_TOKENS)}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("device 'cuda' is asked for, but torch finds no GPU")
    return device


def _load(path: str | Path, dtype: torch.dtype) -> Any:
    """Return the whole model, from safetensors alone."""
    if Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        raise UnsupportedTeacher(
            f"{path} has no *.safetensors file, and pickled weights are not loaded, for they can run code: "
            "convert them with transformers' save_pretrained"
        )
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise UnsupportedTeacher(f"cannot load the teacher at {path}: {str(error).strip().splitlines()[0]}") from error
    model, info = loaded
    if absent := sorted(info["missing_keys"]):
        # transformers fills them with random numbers and goes on
        raise UnsupportedTeacher(f"the teacher at {path} lacks {len(absent)} of its weights, {absent[0]} among them")
    return model


def _check_causal(model: Any, input_ids_BL: Tensor, num_embeddings: int) -> int:
    """Return the width of the logits after making sure that no position sees the last one."""
    changed_BL = input_ids_BL.clone()
    changed_BL[:, -1] = (changed_BL[:, -1] + 1) % num_embeddings
    before_BLV, after_BLV = (model(input_ids=ids, use_cache=False).logits.float() for ids in (input_ids_BL, changed_BL))
    # a mixture of experts rounds differently when one token goes elsewhere
    tolerance = torch.finfo(model.dtype).eps ** 0.5 * before_BLV.abs().max()
    if (before_BLV - after_BLV)[:, :-1].abs().max() > tolerance:
        raise UnsupportedTeacher(f"{type(model).__name__} is not causal: its positions see the tokens that follow")
    return int(before_BLV.shape[-1])
