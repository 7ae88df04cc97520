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

    def encode(self, example: Example) -> npt.NDArray[np.int32]:
        """Return the token ids of text, with the special tokens that the tokenizer adds by itself, or of messages.

        Messages go through the teacher's chat template, without a generation prompt.

        Raises:
            UntokenizableExample: no or a failing chat template, or fewer than 2 tokens.
        """
        if example.messages is not None:
            ids = self._apply_template(example.messages)
        elif example.text is not None:
            ids = self._tokenizer(example.text, verbose=False)["input_ids"]
        else:
            raise UntokenizableExample("the example is token ids already: it needs no tokenizer")
        if len(ids) < 2:
            what = "the text" if example.messages is None else "the conversation"
            message = f"{what} becomes {len(ids)} tokens, at least 2 are needed: leave it out of the data set"
            raise UntokenizableExample(message, Code.SEQUENCE_TOO_SHORT)
        return np.asarray(ids, dtype=np.int32)

    def _apply_template(self, messages: list[dict[str, str]]) -> list[int]:
        if not messages:
            return []
        if not self._tokenizer.chat_template:
            raise UntokenizableExample(
                f"the teacher at {self._path} has no chat template: send a data set of text or input_ids instead"
            )
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=False, return_dict=False
            )
        except (jinja2.TemplateError, ValueError, TypeError, IndexError) as error:
            raise UntokenizableExample(f"the teacher's chat template refuses the messages: {error}") from error
        return ids
