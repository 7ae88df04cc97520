"""Token ids as text to look at; for reading text back, take the tokenizer itself."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from .codes import Code
from .errors import TokenizerError
from .tokenizer_identity import tokenizer_digest, tokenizer_pieces


class Pieces:
    """The pieces of the tokenizer in a Hugging Face folder, which must be the one with this digest.

    Raises:
        TokenizerError: it is another one, or lists no pieces.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        if (found := tokenizer_digest(folder)) != digest:
            raise TokenizerError(
                f"the tokenizer in {folder} is {found}, the rows were made with {digest}", Code.TOKENIZER_MISMATCH
            )
        pieces = tokenizer_pieces(folder)
        if pieces is None:
            raise TokenizerError(f"{folder} has neither tokenizer.json nor vocab.json to read pieces from")
        self._pieces = pieces
        self._folder = folder

    def text(self, token_id: int) -> str:
        """Return what a token stands for, quoted; a vocabulary may have ids beyond its tokenizer's."""
        piece = self._pieces.get(token_id)
        if piece is None:
            return "(no piece)"
        if self._is_byte_level and all(letter in BYTES for letter in piece):
            piece = bytes(BYTES[letter] for letter in piece).decode(errors="replace")
        return repr(piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " "))

    @cached_property
    def _is_byte_level(self) -> bool:
        path = self._folder / "tokenizer.json"
        return not path.is_file() or "ByteLevel" in json.dumps(json.loads(path.read_bytes()).get("decoder"))


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter that byte-level tokenizers write it with (GPT-2's table)."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_alphabet()
