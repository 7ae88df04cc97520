"""Sizing up a request without storing anything.

The data set is parsed in a process of its own: parsers of compressed columns can be brought to crash, and a crash
there is an answer, not the end of the server.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from ..format_spec import CacheRequest, Code, DatasetError, Generation, TeachercacheError
from .errors import Unavailable
from .teachers import Limits

CHILD = f"{__package__}.sizing_child"
TIMEOUT_S = 3600.0
# measured for SmolLM2-135M on prose and code: a token without its rows' entries, an entry, a tail sample
TOKEN_BYTES, ENTRY_BYTES, SAMPLE_BYTES = 20.0, 1.8, 1.4


def measure(dataset: Path, limits: Limits, generate: Generation | None = None) -> tuple[int, int]:
    """Return the numbers of sequences and tokens of a data set, with what may be generated.

    Raises:
        TeachercacheError: with the code that `plan.count` gives, or of an invalid data set when the parser crashed.
    """
    arguments = [str(dataset), str(limits.path), str(limits.vocab_size), str(limits.max_length)]
    if generate is not None:
        arguments.append(json.dumps(generate.to_json()))
    try:
        done = subprocess.run(
            [sys.executable, "-m", CHILD, *arguments],
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


def estimate_bytes(positions: int, spec: CacheRequest) -> int:
    """Return about how many bytes the shards of `positions` tokens will have."""
    entries = min(spec.k, _mean_entries(float(spec.min_prob)))
    return int(positions * (TOKEN_BYTES + ENTRY_BYTES * entries + SAMPLE_BYTES * spec.tail_samples))


def _mean_entries(min_prob: float) -> float:
    """Return about how many entries of a row are at least so probable: 1.6 for 0.1, 8 for 0.01, 40 for 0.001."""
    return max(1.0, 0.32 * min_prob**-0.7) if min_prob else math.inf
