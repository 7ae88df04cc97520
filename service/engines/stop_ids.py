"""The tokens with which a teacher ends what it says."""

from __future__ import annotations

import json
from pathlib import Path


def stop_ids(path: Path) -> list[int]:
    """Return the end-of-sequence ids of a Hugging Face folder, none if it states none.

    They stand in generation_config.json, where chat models list all that may end a turn, else in config.json.
    """
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            config = json.loads((path / name).read_bytes())
            stated = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
            if stated is not None:
                return sorted({stated} if isinstance(stated, int) else set(stated))
    return []
