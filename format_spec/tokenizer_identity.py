"""Identity of a tokenizer: what each token id stands for.

Two folders have the same identity when they map the same ids to the same pieces of text. That is what makes
a teacher's rows mean the same to a student. Files are not compared byte for byte, for `save_pretrained` rewrites
them: it moves special tokens between files, spells merges in another way and adds padding settings. How text
is cut into pieces (merges, pre-tokenizer, normalizer) is left out too: cached rows hold ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .canonical import canonical_json
from .digest import digest_bytes, digest_file
from .errors import FormatError, TokenizerError

# everything that a tokenizer may be made of
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


def tokenizer_digest(folder: Path) -> str:
    """Return the identity of the tokenizer in a Hugging Face folder.

    It is the digest of canonical JSON: the pairs [id, piece], by id. Without tokenizer.json and vocab.json it is
    the digest of the SentencePiece model or of vocab.txt.

    Raises:
        TokenizerError: there is none, or its files are damaged.
    """
    pieces = tokenizer_pieces(folder)
    if pieces is not None:
        try:
            return digest_bytes(canonical_json(sorted([number, piece] for number, piece in pieces.items())))
        except (TypeError, FormatError) as error:
            raise TokenizerError(f"the tokenizer in {folder} cannot be read: {error}") from error
    for name in ("tokenizer.model", "spiece.model", "vocab.txt"):
        if (folder / name).is_file():
            return digest_file(folder / name)
    raise TokenizerError(f"{folder} has no tokenizer: none of tokenizer.json, vocab.json, tokenizer.model")


def tokenizer_pieces(folder: Path) -> dict[int, str] | None:
    """Return the piece of text of each token id; None where neither tokenizer.json nor vocab.json is there.

    Raises:
        TokenizerError: the files are damaged.
    """
    try:
        for name, pairs in (("tokenizer.json", _of_tokenizer), ("vocab.json", _of_vocab)):
            if (folder / name).is_file():
                return dict(pairs(json.loads((folder / name).read_bytes()))) | _added(folder)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TokenizerError(f"the tokenizer in {folder} cannot be read: {error}") from error
    return None


def _of_tokenizer(value: Any) -> Iterable[tuple[int, str]]:
    vocab = value["model"]["vocab"]
    # Unigram lists [piece, score] by id
    yield from _of_vocab(vocab) if isinstance(vocab, dict) else ((i, entry[0]) for i, entry in enumerate(vocab))
    yield from ((token["id"], token["content"]) for token in value.get("added_tokens") or [])


def _of_vocab(value: Any) -> Iterable[tuple[int, str]]:
    return ((number, piece) for piece, number in value.items())


def _added(folder: Path) -> dict[int, str]:
    path = folder / "added_tokens.json"
    return dict(_of_vocab(json.loads(path.read_bytes()))) if path.is_file() else {}
