"""Real text for the demo: the language reference that every Python carries for its `help()`.

It is prose that somebody wrote, it needs no download, and its licence (PSF) lets anybody use it. Its content differs
between Python versions, so token counts and losses do too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from .errors import TextMissing

# lines that only draw: underlined headings, borders and empty rows of tables
_RULE = re.compile(r"[ ]*[-+=*~^|][-+=*~^| ]{3,}")
_LONG_PARAGRAPH = 40
_SHORTEST_DOCUMENT = 400


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    text: str


def load_documents() -> list[Document]:
    """Return the documentation topics of this Python in alphabetical order, no paragraph in two of them.

    About 70 documents, 370,000 characters or more. A topic of which fewer than 400 characters are left is dropped.

    Raises:
        TextMissing: this Python was packaged without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise TextMissing("this Python was packaged without pydoc_data: use a full python.org or Debian one") from error
    documents = without_repeats([Document(name, clean(text)) for name, text in topics.items()])
    return sorted((d for d in documents if len(d.text) >= _SHORTEST_DOCUMENT), key=lambda d: d.name)


def clean(text: str) -> str:
    """Return `text` without the lines that only draw, and with one empty line between paragraphs."""
    lines = [line.rstrip() for line in text.splitlines() if not _RULE.fullmatch(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """Return the documents, shortest first, without the paragraphs that a shorter one holds already.

    Long topics embed short ones (a fifth of the whole text), so a held-out topic would else be trained on. Taking the
    shortest first leaves a section with the topic that is about it alone.
    """
    seen: set[str] = set()
    kept: list[Document] = []
    for document in sorted(documents, key=lambda d: (len(d.text), d.name)):
        paragraphs = document.text.split("\n\n")
        # indentation differs where a section is embedded
        keys = [" ".join(paragraph.split()) for paragraph in paragraphs]
        # sentinels: the first and the last paragraph have one neighbour
        repeated = [False, *(key in seen for key in keys), False]
        fresh = [
            paragraph
            for i, (paragraph, key) in enumerate(zip(paragraphs, keys, strict=True), start=1)
            # "For example:" alone is no repeat, but as part of a repeated passage it is
            if not (repeated[i] and (len(key) >= _LONG_PARAGRAPH or repeated[i - 1] or repeated[i + 1]))
        ]
        seen.update(keys)
        kept.append(Document(document.name, "\n\n".join(fresh)))
    return kept


def split(
    documents: Iterable[Document], heldout_fraction: float = 0.15, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Return the training and the held-out documents, each shuffled.

    Side and place of a document follow from `seed` and its name alone: it never changes sides when others come or go.
    The order takes documents from all over the corpus, so the first few thousand tokens are a fair sample.
    """
    if not 0.0 <= heldout_fraction <= 1.0:
        raise ValueError(f"heldout_fraction is {heldout_fraction}, must be between 0 and 1")

    def draw(document: Document) -> float:
        return _uniform(f"{seed}:{document.name}")

    shuffled = sorted(documents, key=draw)
    heldout = [document for document in shuffled if draw(document) < heldout_fraction]
    train = [document for document in shuffled if draw(document) >= heldout_fraction]
    return train, heldout


def pack_tokens(
    texts: Iterable[str], tokenizer: Tokenizer, sequence_length: int, max_tokens: int, *, min_length: int = 32
) -> list[list[int]]:
    """Return token sequences cut from the texts in turn, at most `max_tokens` tokens in all.

    A sequence never spans two texts. Each has `sequence_length` tokens, but the last of a text may be shorter, and is
    dropped below `min_length` tokens. No special tokens are added.
    """
    if not 2 <= min_length <= sequence_length:
        raise ValueError(f"min_length is {min_length}, must be between 2 and sequence_length = {sequence_length}")
    sequences: list[list[int]] = []
    room = max_tokens
    for text in texts:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        for start in range(0, len(token_ids), sequence_length):
            piece = token_ids[start : start + sequence_length]
            if len(piece) < min_length:
                continue
            if len(piece) > room:
                return sequences
            sequences.append(piece)
            room -= len(piece)
    return sequences


def _uniform(key: str) -> float:
    """Return a number in [0, 1) that `key` alone decides."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48
