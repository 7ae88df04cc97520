"""Parquet files as a source of sequences: one file, or those of a folder, a record at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .canonical import canonical_json
from .digest import digest_bytes, digest_file
from .errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# records are whole sequences: a few at a time are enough to make pyarrow's calls cheap
BATCH_RECORDS = 8
INT32 = np.iinfo(np.int32)


class ParquetSource:
    """The records of the Parquet file at `path`, or of a folder's files in the order of the numbers in their names.

    Raises:
        SourceError: no Parquet file is there, one is damaged, or their columns differ.
    """

    def __init__(self, path: Path) -> None:
        self.files = sorted(path.glob("*.parquet"), key=_natural) if path.is_dir() else [path]
        if not self.files:
            raise SourceError(f"{path} has no .parquet file")
        self.num_records = 0
        for number, file in enumerate(self.files):
            with _reading(file) as opened:
                self.num_records += opened.metadata.num_rows
                if number == 0:
                    self.schema: pa.Schema = opened.schema_arrow
                elif opened.schema_arrow != self.schema:
                    raise SourceError(f"{file} has other columns than {self.files[0]}")
        if not self.num_records:
            raise SourceError(f"{path} holds no sequence")

    @property
    def digest(self) -> str:
        """Identity of the data: the file's digest, or of several files the digest of the list of theirs."""
        digests = [digest_file(file) for file in self.files]
        return digests[0] if len(digests) == 1 else digest_bytes(canonical_json(digests))

    def has(self, *columns: str) -> bool:
        """Tell whether the files have all these columns."""
        return set(columns) <= set(self.schema.names)

    def check_lists(self, column: str, depth: int, kinds: Sequence[str]) -> None:
        """Refuse a column that is not made of lists, `depth` of them one in the other, of one of the `kinds`."""
        import pyarrow.types as pt

        kind = self.schema.field(column).type
        for _ in range(depth):
            if not (pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind)):
                break
            kind = kind.value_type
        else:
            tests: dict[str, Callable[[Any], bool]] = {
                "integer": pt.is_integer,
                "byte": pt.is_uint8,
                "float": pt.is_floating,
                "boolean": pt.is_boolean,
            }
            if any(tests[name](kind) for name in kinds):
                return
        raise SourceError(
            f"column {column!r} has type {self.schema.field(column).type}, not {'list of ' * depth}{' or '.join(kinds)}"
        )

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        """Yield the records with these columns of them."""
        for file in self.files:
            number = 0
            with _reading(file) as opened:
                for batch in opened.iter_batches(BATCH_RECORDS, columns=list(columns)):
                    for row in range(batch.num_rows):
                        yield Record(f"{file.name}, record {number}", batch, row)
                        number += 1


class Record:
    """One record, its lists as numpy arrays; `where` names it in errors."""

    def __init__(self, where: str, batch: pa.RecordBatch, row: int) -> None:
        self.where = where
        self._batch = batch
        self._row = row

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return a list; where floats are missing they are NaN."""
        return self._numpy(column, self._list(column))

    def lists(self, column: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the values of a list of lists, one list after the other, and their lengths; a missing one has none."""
        import pyarrow.compute as pc

        lists = self._list(column)
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        return self._numpy(column, lists.flatten()), lengths.astype(np.int64)

    def matrix(self, column: str, width: int, fill: float, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
        """Return a list of lists as rows of `width` values, filled up where they have fewer."""
        values, lengths = self.lists(column)
        if len(lengths) and lengths.max() > width:
            raise SourceError(f"{self.where}: a list of {column!r} has {lengths.max()} entries, more than {width}")
        matrix = np.full((len(lengths), width), fill, dtype or values.dtype)
        matrix[np.arange(width) < lengths[:, None]] = values
        return matrix

    def _list(self, column: str) -> pa.Array:
        scalar = self._batch.column(column)[self._row]
        if not scalar.is_valid:
            raise SourceError(f"{self.where}: {column!r} is null")
        return scalar.values

    def _numpy(self, column: str, array: pa.Array) -> npt.NDArray[Any]:
        import pyarrow.types as pt

        if array.null_count and not pt.is_floating(array.type):
            raise SourceError(f"{self.where}: {column!r} has null entries")
        values = np.asarray(array.to_numpy(zero_copy_only=False))
        if pt.is_integer(array.type) and len(values) and not INT32.min <= values.min() <= values.max() <= INT32.max:
            raise SourceError(f"{self.where}: {column!r} holds {values.min()}..{values.max()}, not 32-bit integers")
        return values


@contextmanager
def _reading(file: Path) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            yield opened
    except FileNotFoundError as error:
        raise SourceError.of(file, error) from error
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise SourceError(f"{file} cannot be read as Parquet: {reason}") from error


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    # data_10 comes after data_9
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", path.name)]
