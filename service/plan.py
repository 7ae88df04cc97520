"""From an uploaded data set to ranges that can be scored: validation, tokenisation, cutting.

The result is a normalised token file: Parquet with `input_ids` and `loss_mask`, one row group a range, so
that a range is read without touching the others. The same data set gives the same file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..format_spec import Code, Dataset, Example, Generation
from .errors import SequenceError
from .meta import Plan, Range
from .store import Store
from .teachers import Limits


def make_plan(
    dataset: Path,
    limits: Limits,
    shard_positions: int,
    store: Store,
    tick: Callable[[], None] = lambda: None,
    generate: Generation | None = None,
) -> Plan:
    """Validate a data set, store its tokens and return its ranges; `tick` is called after each sequence.

    With `generate` it is one of prompts, and the positions of a range are the most that may come of it.

    Raises:
        DatasetError, SequenceError: the data set cannot be scored; the message names the sequence.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))])
    ranges: list[Range] = []
    size = sizes(limits, generate)
    with store.stage(dataset.stat().st_size) as staging:
        with pq.ParquetWriter(staging, schema, compression="zstd", write_page_checksum=True) as writer:
            first = 0
            for group in cut(_ticking(read_sequences(dataset, limits, generate), tick), shard_positions, size):
                columns = [[example.input_ids for example in group], [example.loss_mask for example in group]]
                table = pa.table(dict(zip(schema.names, columns, strict=True)), schema=schema)
                writer.write_table(table, row_group_size=len(group))
                ranges.append(Range(first, len(group), sum(map(size, group)), content_of(group)))
                first += len(group)
        return Plan(staging.commit(), tuple(ranges))


def content_of(examples: Iterable[Example]) -> str:
    """Return a digest of sequences and their loss masks."""
    content = hashlib.sha256()
    for example in examples:
        mask = example.loss_mask
        ids = token_ids(example).astype("<i4")
        content.update(len(ids).to_bytes(8, "little") + (b"-" if mask is None else b"+"))
        content.update(ids.tobytes() + (b"" if mask is None else mask.tobytes()))
    return "sha256:" + content.hexdigest()


def count(dataset: Path, limits: Limits, generate: Generation | None = None) -> tuple[int, int]:
    """Validate a data set and return its numbers of sequences and tokens; see `make_plan`."""
    lengths = list(map(sizes(limits, generate), read_sequences(dataset, limits, generate)))
    return len(lengths), sum(lengths)


def sizes(limits: Limits, generate: Generation | None) -> Callable[[Example], int]:
    """Return what tells how many tokens, at the most, a sequence of the data set will have."""
    if generate is None:
        return num_tokens
    return lambda prompt: num_tokens(prompt) + generate.room(num_tokens(prompt), limits.max_length)


class TokenFiles:
    """The normalised token file of the newest request, kept open: its metadata grows with its ranges."""

    def __init__(self) -> None:
        self._open: tuple[tuple[Path, int, int], Dataset] | None = None

    def read(self, path: Path, number: int) -> list[Example]:
        """Return the examples of range `number`."""
        stat = path.stat()
        # one that was damaged is made again under its name
        identity = path, stat.st_ino, stat.st_mtime_ns
        if self._open is None or self._open[0] != identity:
            self.close()
            self._open = identity, Dataset(path)
        return self._open[1].read_row_group(number)

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def read_sequences(path: Path, limits: Limits, generate: Generation | None = None) -> Iterator[Example]:
    """Yield the sequences of a data set as token ids that the teacher can score, or prompts that it can continue."""
    with Dataset(path) as dataset:
        examples: Iterable[Example] = dataset
        if dataset.kind != "input_ids":
            examples = _tokenised(dataset, limits.path, as_prompts=generate is not None)
        for number, example in enumerate(examples):
            if generate is None:
                check_sequence(number, token_ids(example), limits)
            else:
                check_prompt(number, token_ids(example), limits)
            yield example


def check_prompt(number: int, ids: npt.NDArray[np.integer], limits: Limits) -> None:
    """Refuse a prompt that the teacher cannot continue by a token at the least; raises SequenceError."""
    if len(ids) < 1:
        raise SequenceError(
            f"sequence {number} is an empty prompt; at least 1 token is needed", Code.SEQUENCE_TOO_SHORT
        )
    if len(ids) >= limits.max_length:
        raise SequenceError(
            f"sequence {number} is a prompt of {len(ids)} tokens, which leaves none of the teacher's"
            f" {limits.max_length} for a completion",
            Code.SEQUENCE_TOO_LONG,
        )
    _check_ids(number, ids, limits)


def check_sequence(number: int, ids: npt.NDArray[np.integer], limits: Limits) -> None:
    """Refuse a sequence that the teacher cannot score.

    Raises:
        SequenceError: with the code of the rule, naming the sequence, the value and the limit.
    """
    if len(ids) < 2:
        raise SequenceError(
            f"sequence {number} has {len(ids)} tokens; at least 2 are needed, for row i predicts token i + 1",
            Code.SEQUENCE_TOO_SHORT,
        )
    if len(ids) > limits.max_length:
        raise SequenceError(
            f"sequence {number} has {len(ids)} tokens, above the teacher's limit of {limits.max_length}",
            Code.SEQUENCE_TOO_LONG,
        )
    _check_ids(number, ids, limits)


def _check_ids(number: int, ids: npt.NDArray[np.integer], limits: Limits) -> None:
    outside = (ids < 0) | (ids >= limits.vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise SequenceError(
            f"sequence {number} has token id {ids[position]} at position {position}, outside the teacher's"
            f" vocabulary of {limits.vocab_size} (0 to {limits.vocab_size - 1})",
            Code.TOKEN_OUT_OF_VOCABULARY,
        )


def token_ids(example: Example) -> npt.NDArray[np.int64]:
    """Return the token ids of an example that has them."""
    assert example.input_ids is not None
    return example.input_ids


def num_tokens(example: Example) -> int:
    """Return the length of an example that has token ids."""
    return len(token_ids(example))


def cut(
    examples: Iterable[Example], shard_positions: int, size: Callable[[Example], int] = num_tokens
) -> Iterator[list[Example]]:
    """Yield consecutive groups of at most `shard_positions` tokens, and of at least one sequence."""
    group: list[Example] = []
    positions = 0
    for example in examples:
        if group and positions + size(example) > shard_positions:
            yield group
            group, positions = [], 0
        group.append(example)
        positions += size(example)
    if group:
        yield group


def _ticking(examples: Iterable[Example], tick: Callable[[], None]) -> Iterator[Example]:
    for example in examples:
        tick()
        yield example


def _tokenised(dataset: Dataset, teacher: Path, *, as_prompts: bool) -> Iterator[Example]:
    # here, for it brings transformers with it, which a data set of token ids can do without
    from .engines.errors import UntokenizableExample
    from .engines.tokenizer import Tokenizer

    tokenizer = Tokenizer(teacher)
    for number, example in enumerate(dataset):
        try:
            yield tokenizer.encode(example, as_prompt=as_prompts)
        except UntokenizableExample as error:
            raise SequenceError(f"sequence {number}: {error}", error.code) from error
