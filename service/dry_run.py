"""Sizing up a request without storing anything: the data set is parsed in a process of its own.

Parsers of compressed columns can be brought to crash; a crash here is an answer, not the end of the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ..format_spec import Code, DatasetError, TeachercacheError
from .errors import Unavailable
from .plan import Limits, count

TIMEOUT_S = 3600.0
COMPRESSION = 0.8


def measure(dataset: Path, limits: Limits) -> tuple[int, int]:
    """Return the numbers of sequences and tokens of a data set.

    Raises:
        DatasetError, TeachercacheError: as `plan.count` does, or the parser crashed.
    """
    arguments = [str(dataset), str(limits.path), str(limits.vocab_size), str(limits.max_length)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"sizing up the data set took longer than {TIMEOUT_S:.0f} s") from error
    if done.returncode < 0:
        raise DatasetError(f"the data set cannot be read: its parser died of signal {-done.returncode}")
    if done.returncode:
        raise Unavailable(f"the process that sizes up data sets failed: {done.stderr.strip().splitlines()[-1:]}")
    answer = json.loads(done.stdout)
    if "code" in answer:
        raise TeachercacheError(answer["detail"], Code.from_wire(answer["code"]))
    return answer["sequences"], answer["positions"]


def estimate_bytes(positions: int, k: int, tail_samples: int) -> int:
    """Return about how many bytes the shards of `positions` tokens will have."""
    raw = 5 * k + 3 * tail_samples + 16
    return int(positions * raw * COMPRESSION)


def main(dataset: str, path: str, vocab_size: str, max_length: str) -> None:
    """Print the answer as one JSON object."""
    try:
        sequences, positions = count(Path(dataset), Limits(Path(path), int(vocab_size), int(max_length)))
        answer: dict[str, int | str] = {"sequences": sequences, "positions": positions}
    except TeachercacheError as error:
        answer = {"code": error.code.wire, "detail": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
