"""Text and chat messages to token ids, with the teacher's own tokenizer and template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import transformers

from ...format_spec import Code, Example
from ..errors import UnsupportedTeacher
from .errors import UntokenizableExample


class Tokenizer:
    """The tokenizer of the teacher at a local directory or hub id.

    Raises:
        UnsupportedTeacher: there is none that can be loaded without code of its own.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UnsupportedTeacher(f"cannot load a tokenizer from {path}: {reason}") from error
        self._path = path

    def encode(self, example: Example, *, as_prompt: bool = False) -> Example:
        """Return the token ids of text, with the special tokens that the tokenizer adds by itself, or of messages.

        Messages go through the teacher's chat template; their loss mask is true for the tokens that an assistant says,
        the one that ends its turn included. As a prompt they end with the template's generation prompt, and a text
        may be a single token.

        Raises:
            UntokenizableExample: no or a failing chat template, no assistant who says something, or too few tokens.
        """
        mask: npt.NDArray[np.bool_] | None = None
        if example.messages is not None:
            what = "the conversation"
            text = self._render(example.messages, as_prompt) if example.messages else ""
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=self._tokenizer.is_fast)
            ids = encoding["input_ids"]
            if not as_prompt and ids:
                mask = self._said_by_assistants(example.messages, text, ids, encoding.get("offset_mapping"))
        elif example.text is not None:
            what = "the text"
            ids = self._tokenizer(example.text, verbose=False)["input_ids"]
        else:
            raise UntokenizableExample("the example is token ids already: it needs no tokenizer")
        needed = 1 if as_prompt else 2
        if len(ids) < needed:
            message = f"{what} becomes {len(ids)} tokens, at least {needed} needed: leave it out of the data set"
            raise UntokenizableExample(message, Code.SEQUENCE_TOO_SHORT)
        return Example(input_ids=np.asarray(ids, np.int64), loss_mask=mask)

    def _render(self, messages: list[dict[str, str]], as_prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise UntokenizableExample(
                f"the teacher at {self._path} has no chat template: send a data set of text or input_ids instead"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=as_prompt, tokenize=False)
        except (jinja2.TemplateError, ValueError, TypeError, IndexError) as error:
            raise UntokenizableExample(f"the teacher's chat template refuses the messages: {error}") from error
        return text

    def _said_by_assistants(
        self, messages: list[dict[str, str]], text: str, ids: list[int], offsets: list[tuple[int, int]] | None
    ) -> npt.NDArray[np.bool_]:
        """Return which tokens assistants said: from the end of a turn's generation prompt to the end of the turn."""
        if offsets is None:
            raise UntokenizableExample(
                f"the tokenizer at {self._path} is a slow one, which does not say where in the text its tokens are: "
                "send input_ids with a loss_mask instead"
            )
        begins = np.array([begin for begin, _ in offsets])
        mask = np.zeros(len(ids), np.bool_)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], True) if number else ""
            # templates may strip it
            said = message["content"] if message["content"] in text else message["content"].strip()
            begin = text.find(said, len(prompt))
            if not text.startswith(prompt) or begin < 0:
                raise UntokenizableExample(
                    f"the chat template writes message {number} so that what the assistant says cannot be told from "
                    "the rest: send input_ids with a loss_mask instead"
                )
            end = int(np.searchsorted(begins, begin + len(said)))
            mask[np.searchsorted(begins, len(prompt) if number else begin) : end] = True
            if end < len(ids) and begins[end] == begin + len(said) and ids[end] in self._tokenizer.all_special_ids:
                mask[end] = True
        if not mask.any():
            raise UntokenizableExample(
                "the conversation has no message of an assistant, so there is nothing to learn from it; "
                "a request with generate has the teacher answer it"
            )
        return mask
