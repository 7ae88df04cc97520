"""The process that parses a data set for `sizing.measure`; it prints one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..format_spec import Generation, TeachercacheError
from .plan import count
from .teachers import Limits


def main(dataset: str, path: str, vocab_size: str, max_length: str, generate: str = "null") -> None:
    """Print the numbers of sequences and tokens, or what is wrong."""
    try:
        limits = Limits(Path(path), int(vocab_size), int(max_length))
        sequences, positions = count(Path(dataset), limits, Generation.of(json.loads(generate)))
        answer: dict[str, int | str] = {"sequences": sequences, "positions": positions}
    except TeachercacheError as error:
        answer = {"code": error.code.wire, "detail": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
