"""The data set a teacher scores: one Parquet file with one sequence a row.

Exactly one of the columns `input_ids` (list of integers), `text` (string) and `messages`
(list of struct with role and content); with `input_ids` an optional `loss_mask` (list of booleans).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

_SURROGATE = re.compile("[\ud800-\udfff]")
KINDS = ("input_ids", "text", "messages")
ROW_GROUP_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a data set: token ids, or text or chat messages still to be tokenised."""

    input_ids: npt.NDArray[np.int64] | None = None
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = None


class Dataset:
    """An open data set file, read a row group at a time.

    Raises:
        DatasetError: not Parquet, empty, or columns other than the module describes.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            self.schema: pa.Schema = self._file.schema_arrow
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise DatasetError(f"not a Parquet file ({reason}); upload one with a column of {list(KINDS)}") from error
        self.num_sequences: int = self._file.metadata.num_rows
        if self.num_sequences == 0:
            raise DatasetError("the data set is empty; it needs at least one sequence")
        present = [name for name in KINDS if name in self.schema.names]
        if len(present) != 1:
            raise DatasetError(f"need exactly one of the columns {list(KINDS)}, found {present or self.schema.names}")
        self.kind = present[0]
        allowed = {self.kind, "loss_mask"} if self.kind == "input_ids" else {self.kind}
        if extra := set(self.schema.names) - allowed:
            raise DatasetError(f"unknown columns {sorted(extra)} beside {self.kind!r}")
        self._check_types()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Example]:
        return self.read(0, self.num_sequences)

    def read_row_group(self, number: int) -> list[Example]:
        """Return the examples of one row group."""
        return list(self._examples(self._table(number), 0))

    def read(self, first: int, count: int) -> Iterator[Example]:
        """Yield `count` examples from number `first`, touching only the row groups that hold them."""
        start = 0
        for group in range(self._file.metadata.num_row_groups):
            size = self._file.metadata.row_group(group).num_rows
            lo, hi = max(first - start, 0), min(first + count - start, size)
            if lo < hi:
                yield from self._examples(self._table(group).slice(lo, hi - lo), start + lo)
            start += size

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _table(self, group: int) -> pa.Table:
        import pyarrow as pa

        try:
            table = self._file.read_row_group(group)
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DatasetError(f"damaged Parquet data in row group {group}: {error}") from error
        return table

    def _check_types(self) -> None:
        import pyarrow.types as pt

        def is_list(kind: pa.DataType) -> bool:
            return bool(pt.is_list(kind) or pt.is_large_list(kind))

        column = self.schema.field(self.kind).type
        if self.kind == "input_ids":
            good = is_list(column) and pt.is_integer(column.value_type)
        elif self.kind == "text":
            good = pt.is_string(column) or pt.is_large_string(column)
        else:
            good = is_list(column) and pt.is_struct(column.value_type)
            good = good and {f.name for f in column.value_type} == {"role", "content"}
        if not good:
            raise DatasetError(f"column {self.kind!r} has type {column}; see format_spec/dataset.py for what is read")
        if "loss_mask" in self.schema.names:
            mask = self.schema.field("loss_mask").type
            if not (is_list(mask) and (pt.is_boolean(mask.value_type) or pt.is_integer(mask.value_type))):
                raise DatasetError(f"column 'loss_mask' has type {mask}, not a list of booleans or integers")

    def _examples(self, table: pa.Table, first: int) -> Iterator[Example]:
        column = table.column(self.kind)
        masks = table.column("loss_mask") if "loss_mask" in table.column_names else None
        for i in range(table.num_rows):
            where = f"sequence {first + i}"
            if not column[i].is_valid:
                raise DatasetError(f"{where} is null")
            if self.kind == "text":
                yield Example(text=column[i].as_py())
            elif self.kind == "messages":
                yield Example(messages=[dict(message) for message in column[i].as_py()])
            else:
                ids = column[i].values
                if ids.null_count:
                    raise DatasetError(f"{where} has null token ids")
                mask = None if masks is None or not masks[i].is_valid else np.asarray(masks[i].as_py(), dtype=np.bool_)
                if mask is not None and len(mask) != len(ids):
                    raise DatasetError(f"{where} has {len(ids)} tokens and a loss mask of {len(mask)}")
                yield Example(input_ids=ids.to_numpy(zero_copy_only=False).astype(np.int64), loss_mask=mask)


def write_dataset(path: Path, examples: Iterable[Example]) -> int:
    """Write a data set to `path` and return its number of sequences; the same examples give the same bytes.

    Raises:
        DatasetError: no examples, or examples of different kinds.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    total = 0
    for block in _blocks(examples):
        if writer is None:
            kind, schema = _schema(block[0])
            writer = pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)
        columns = {name: [_value(example, name, kind) for example in block] for name in schema.names}
        writer.write_table(pa.table(columns, schema=schema))
        total += len(block)
    if writer is None:
        raise DatasetError("the data set is empty; it needs at least one sequence")
    writer.close()
    return total


def read_jsonl(path: Path) -> Iterator[Example]:
    """Yield the examples of a JSON Lines file: each line an object with one of the columns.

    Raises:
        DatasetError: names the line that is not such an object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DatasetError(f"{path.name} line {number} is not JSON: {error}") from error
            present = [name for name in KINDS if isinstance(value, dict) and name in value]
            if len(present) != 1:
                raise DatasetError(f"{path.name} line {number} needs exactly one of the keys {list(KINDS)}")
            yield _parse(present[0], value, f"{path.name} line {number}")


def _parse(kind: str, value: dict[str, Any], where: str) -> Example:
    item = value[kind]
    if kind == "text" and _is_text(item):
        return Example(text=item)
    if kind == "messages" and isinstance(item, list) and all(_is_message(message) for message in item):
        return Example(messages=[{"role": message["role"], "content": message["content"]} for message in item])
    if kind == "input_ids" and isinstance(item, list) and all(type(x) is int and abs(x) < 2**31 for x in item):
        mask = value.get("loss_mask")
        if mask is None:
            return Example(input_ids=np.asarray(item, np.int64))
        if isinstance(mask, list) and len(mask) == len(item) and all(x in (0, 1) for x in mask):
            return Example(input_ids=np.asarray(item, np.int64), loss_mask=np.asarray(mask, np.bool_))
        raise DatasetError(f"{where}: 'loss_mask' must hold one boolean a token")
    raise DatasetError(f"{where}: {kind!r} has the wrong shape")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role")) and _is_text(value.get("content"))


def _is_text(value: Any) -> bool:
    # JSON's escapes can spell half of a surrogate pair, which is no Unicode text and cannot be stored
    return isinstance(value, str) and _SURROGATE.search(value) is None


def _blocks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    block: list[Example] = []
    for example in examples:
        block.append(example)
        if len(block) == ROW_GROUP_ROWS:
            yield block
            block = []
    if block:
        yield block


def _schema(example: Example) -> tuple[str, pa.Schema]:
    import pyarrow as pa

    kind = next((name for name in KINDS if getattr(example, name) is not None), "")
    if kind == "text":
        return kind, pa.schema([("text", pa.string())])
    if kind == "messages":
        return kind, pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
    return kind, pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))])


def _value(example: Example, name: str, kind: str) -> Any:
    if getattr(example, kind) is None:
        raise DatasetError(f"every example must have {kind!r}, as the first one does")
    return getattr(example, name)
