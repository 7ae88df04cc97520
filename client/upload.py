"""What is uploaded: a Parquet data set, or JSON Lines made into one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..format_spec import Dataset, read_jsonl, write_dataset
from .errors import ConfigError

PARQUET_MAGIC = b"PAR1"


@contextlib.contextmanager
def as_parquet(path: Path) -> Iterator[Path]:
    """Give the Parquet file that holds the examples of `path`: itself, or one in a temporary folder.

    Raises:
        DatasetError: the file is no data set; names the line where it is JSON Lines.
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    with contextlib.ExitStack() as stack:
        # a file that calls itself Parquet is judged as that
        if is_parquet or path.suffix == ".parquet":
            parquet = path
        else:
            parquet = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="teachercache-"))) / "data.parquet"
            write_dataset(parquet, read_jsonl(path))
        stack.enter_context(Dataset(parquet))
        yield parquet
