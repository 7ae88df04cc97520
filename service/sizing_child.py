"""The process that parses a data set for `sizing.measure`; it prints one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..format_spec import TeachercacheError
from .plan import count
from .teachers import Limits


def main(dataset: str, path: str, vocab_size: str, max_length: str) -> None:
    """Print the numbers of sequences and tokens, or what is wrong."""
    try:
        sequences, positions = count(Path(dataset), Limits(Path(path), int(vocab_size), int(max_length)))
        answer: dict[str, int | str] = {"sequences": sequences, "positions": positions}
    except TeachercacheError as error:
        answer = {"code": error.code.wire, "detail": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
