"""From a data set to ranges: what is refused, where it is cut, and that it comes out the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_server import MAX_LENGTH, VOCAB_SIZE, tiny_teacher, write_examples

from teachercache.format_spec import Code, DatasetError, Example, TeachercacheError
from teachercache.service.errors import SequenceError, Unavailable
from teachercache.service.plan import TokenFiles, count, cut, make_plan, num_tokens
from teachercache.service.sizing import measure
from teachercache.service.store import LocalStore
from teachercache.service.teachers import Limits

__all__ = ["tiny_teacher"]

LIMITS = Limits(Path("no teacher is needed for token ids"), VOCAB_SIZE, MAX_LENGTH)


def ids(*lengths: int) -> list[Example]:
    """Return sequences of these lengths."""
    return [Example(input_ids=np.arange(length) + number) for number, length in enumerate(lengths)]


@given(st.lists(st.integers(2, 30), max_size=30), st.integers(1, 60))
def test_ranges_tile_the_data_set_and_are_as_long_as_allowed(lengths: list[int], limit: int) -> None:
    groups = list(cut(ids(*lengths), limit))
    assert [num_tokens(example) for group in groups for example in group] == lengths
    sizes = [sum(map(num_tokens, group)) for group in groups]
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        assert group and (size <= limit or len(group) == 1)
        if number + 1 < len(groups):
            assert size + num_tokens(groups[number + 1][0]) > limit


@settings(max_examples=20)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=30), st.integers(1, 60), st.booleans())
def test_a_range_reads_back_what_was_planned(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], limit: int, masked: bool
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    examples = ids(*lengths)
    if masked:
        examples = [Example(input_ids=e.input_ids, loss_mask=np.arange(num_tokens(e)) % 2 == 0) for e in examples]
    store = LocalStore(folder)
    plan = make_plan(write_examples(folder / "x.parquet", examples), LIMITS, limit, store)
    tokens = store.checked_path(plan.tokens.digest)
    assert (plan.sequences, plan.positions) == (len(lengths), sum(lengths))
    assert pq.ParquetFile(tokens).num_row_groups == len(plan.ranges)
    files = TokenFiles()
    found = [example for number in range(len(plan.ranges)) for example in files.read(tokens, number)]
    for example, expected in zip(found, examples, strict=True):
        assert example.input_ids is not None and expected.input_ids is not None
        assert (example.input_ids == expected.input_ids).all()
        assert (example.loss_mask is None) == (not masked)
        assert not masked or (example.loss_mask == expected.loss_mask).all()
    again = make_plan(folder / "x.parquet", LIMITS, limit, store)
    assert again == plan


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        ([5], Code.SEQUENCE_TOO_SHORT, ["sequence 2 has 1 tokens"]),
        ([1] * (MAX_LENGTH + 1), Code.SEQUENCE_TOO_LONG, ["sequence 2 has 65 tokens", "64"]),
        ([1, VOCAB_SIZE, 3], Code.TOKEN_OUT_OF_VOCABULARY, ["sequence 2", "300 at position 1", "0 to 299"]),
        ([-1, 1], Code.TOKEN_OUT_OF_VOCABULARY, ["sequence 2", "-1 at position 0"]),
    ],
)
def test_a_bad_sequence_is_named_by_plan_and_dry_run_alike(
    tmp_path: Path, bad: list[int], code: Code, words: list[str]
) -> None:
    path = write_examples(tmp_path / "x.parquet", [*ids(4, 4), Example(input_ids=np.array(bad))])
    store = LocalStore(tmp_path / "store")
    with pytest.raises(SequenceError) as planned:
        make_plan(path, LIMITS, 100, store)
    with pytest.raises(TeachercacheError) as sized:
        measure(path, LIMITS)
    assert planned.value.code is sized.value.code is code
    assert str(planned.value) == str(sized.value) and all(word in str(sized.value) for word in words)
    assert list(store.staging.iterdir()) == []


def test_limits_themselves_are_allowed(tmp_path: Path) -> None:
    examples = [Example(input_ids=np.array([0, VOCAB_SIZE - 1])), Example(input_ids=np.zeros(MAX_LENGTH, dtype=int))]
    path = write_examples(tmp_path / "x.parquet", examples)
    assert count(path, LIMITS) == measure(path, LIMITS) == (2, 2 + MAX_LENGTH)


def test_each_sequence_ticks(tmp_path: Path) -> None:
    ticks: list[None] = []
    path = write_examples(tmp_path / "x.parquet", ids(3, 4, 5))
    make_plan(path, LIMITS, 4, LocalStore(tmp_path), lambda: ticks.append(None))
    assert len(ticks) == 3


def test_text_and_messages_become_the_teacher_s_tokens(tmp_path: Path, tiny_teacher: Path) -> None:
    import transformers

    limits = Limits(tiny_teacher, VOCAB_SIZE, MAX_LENGTH)
    store = LocalStore(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_teacher)
    path = write_examples(tmp_path / "t.parquet", [Example(text="hello"), Example(text="you")])
    plan = make_plan(path, limits, 100, store)
    found = TokenFiles().read(store.checked_path(plan.tokens.digest), 0)
    assert [example.input_ids.tolist() for example in found] == [
        tokenizer("hello").input_ids,
        tokenizer("you").input_ids,
    ]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = write_examples(tmp_path / "m.parquet", [Example(messages=chat)])
    plan = make_plan(path, limits, 100, store)
    (found,) = TokenFiles().read(store.checked_path(plan.tokens.digest), 0)
    assert tokenizer.decode(found.input_ids) == "user:hi<end>assistant:yo<end>"
    path = write_examples(tmp_path / "s.parquet", [Example(text="fine"), Example(text="x")])
    with pytest.raises(SequenceError, match="sequence 1: the text becomes 1 tokens") as short:
        make_plan(path, limits, 100, store)
    assert short.value.code is Code.SEQUENCE_TOO_SHORT
    path = write_examples(tmp_path / "l.parquet", [Example(text="y" * (MAX_LENGTH + 1))])
    with pytest.raises(SequenceError, match="sequence 0 has 65 tokens"):
        make_plan(path, limits, 100, store)


def test_a_parser_that_crashes_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_examples(tmp_path / "x.parquet", ids(4))
    for script, error, words in (
        ("import os; os.abort()", DatasetError, "signal 6"),
        ("raise SystemExit('no memory')", Unavailable, "no memory"),
    ):
        fake = tmp_path / "python"
        fake.write_text(f'#!/bin/sh\nexec {__import__("sys").executable} -c "{script}"\n')
        fake.chmod(0o755)
        monkeypatch.setattr("teachercache.service.sizing.sys.executable", str(fake))
        with pytest.raises(error, match=words):
            measure(path, LIMITS)
        monkeypatch.undo()
