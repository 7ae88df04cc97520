"""The golden vectors: files that were written once and must be read, or refused, for ever."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import spec_decoder
from make_vectors import VECTORS, readable
from test_format_conformance import ours

from teachercache.format_spec import ShardError

VALID = sorted((VECTORS / "valid").glob("*.tkc"))
INVALID = sorted((VECTORS / "invalid").glob("*.tkc"))


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_vectors_hold_what_their_json_says(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    data = path.read_bytes()
    assert readable(ours(data)) == expected["sequences"]
    assert readable(spec_decoder.decode(data)._asdict()) == expected


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_vectors_are_refused_with_the_error_of_their_name(path: Path) -> None:
    name = path.stem.split("-")[0]
    with pytest.raises(ShardError) as caught:
        ours(path.read_bytes())
    assert type(caught.value).__name__ == name
    with pytest.raises(spec_decoder.SpecError) as second:
        spec_decoder.decode(path.read_bytes())
    assert second.value.name == name


def test_every_error_of_a_reader_has_a_vector() -> None:
    tops = ShardError.__subclasses__()
    readers = {error.__name__ for top in tops for error in (top, *top.__subclasses__())} - {"InvalidRows"}
    assert {path.stem.split("-")[0] for path in INVALID} == readers


def test_the_dump_in_the_text_is_the_smallest_vector() -> None:
    text = (VECTORS.parent / "SPEC.md").read_text()
    lines = re.findall(r"^ *(\d+)  ((?:[0-9a-f]{2} ?)+|\".*?\")  ", text, re.MULTILINE)
    data = b""
    for offset, piece in lines:
        assert int(offset) == len(data)
        data += piece[1:-1].encode() if piece.startswith('"') else bytes.fromhex(piece)
    assert data == (VECTORS / "valid" / "minimal.tkc").read_bytes()
