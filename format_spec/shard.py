"""A shard: head, frames, footer, trailer (SPEC 2). The writer buffers one shard; the reader verifies."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import xxhash

from .columns import Array, blank, check_columns, new_columns
from .constants import (
    FEATURE_REMAP,
    HEADER_FORMAT,
    HEADER_MAGIC,
    MAX_SEQUENCES,
    PAD_CODE,
)
from .decoder import FrameDecoder
from .digest import content_key
from .errors import CorruptFrame, InvalidRows, LimitExceeded, TruncatedShard
from .footer import HEADER_SIZE, INDEX_DTYPE, TRAILER_SIZE, Footer, Trailer, check_head
from .frame import ID_COLUMNS, Columns, encode_frame, split_frame, to_columns
from .metadata import ShardMetadata
from .planes import PlaneEncoder
from .remap import RemapTable, frequency_classes
from .rows import Rows, ScoredSequence
from .version import FORMAT_MAJOR, FORMAT_MINOR

TAIL_READ_BYTES = 1 << 16


class ShardWriter:
    """Writes a shard to a binary file when `finish` is called.

    The ids of the whole shard are counted before the first is coded, so its columns are held in memory: about
    6 bytes an entry. The same sequences give the same bytes from the same library versions. Making the file
    durable is the caller's part. `remap=False` leaves the table out.
    """

    def __init__(self, file: BinaryIO, metadata: ShardMetadata, *, remap: bool = True) -> None:
        self.metadata = metadata
        self._file = file
        self._remap = remap
        self._sequences: list[tuple[Columns, int, bytes]] = []

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._sequences)

    @property
    def num_positions(self) -> int:
        """Tokens added so far."""
        return sum(positions for _, positions, _ in self._sequences)

    def add(self, sequence: ScoredSequence) -> None:
        """Append a sequence.

        Raises:
            InvalidRows: the format cannot hold these rows; nothing was added.
            LimitExceeded: the sequence or the shard would be too large (SPEC 9); nothing was added.
        """
        if len(self._sequences) == MAX_SEQUENCES:
            raise LimitExceeded(f"a shard holds at most {MAX_SEQUENCES} sequences (SPEC 9)")
        self._sequences.append((to_columns(sequence, self.metadata), len(sequence), sequence.key[:8]))

    def finish(self) -> int:
        """Write the shard and return its size in bytes."""
        if not self._sequences:
            raise InvalidRows("a shard needs at least one sequence (SPEC 7.1)")
        table = self._table() if self._remap else None
        features = 0 if table is None else FEATURE_REMAP
        self._file.write(struct.pack(HEADER_FORMAT, HEADER_MAGIC, FORMAT_MAJOR, FORMAT_MINOR, features, 0))
        encoder, offset = PlaneEncoder(), HEADER_SIZE
        index = np.zeros(len(self._sequences), INDEX_DTYPE)
        for number, (columns, positions, key) in enumerate(self._sequences):
            frame = encode_frame(columns, positions, self.metadata, table, encoder)
            index[number] = (offset, len(frame), positions, key, xxhash.xxh3_64_intdigest(frame))
            self._file.write(frame)
            offset += len(frame)
        tail = Footer(self.metadata, table, index).to_bytes(offset, features)
        self._file.write(tail)
        return offset + len(tail)

    def _table(self) -> RemapTable:
        columns = (columns[name] for columns, _, _ in self._sequences for name in ID_COLUMNS if name in columns)
        return RemapTable(frequency_classes(columns, self.metadata.fingerprint.vocab_size))


class Shard:
    """An open shard, readable at any sequence; head and footer are verified on opening.

    Each frame is checked against its checksum before it is decompressed. Reads carry their own offset, so a
    shard survives a fork; threads need a shard each.

    Raises:
        ShardError: the subclass that names the broken clause of SPEC.md.
    """

    _data = b""
    _fd: int | None = None
    _fetch: Callable[[int, int], bytes] | None = None

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)
        self._load()

    @classmethod
    def open(cls, path: Path | str) -> Shard:
        """Open the shard at `path`."""
        shard = cls.__new__(cls)
        shard._fd = os.open(path, os.O_RDONLY)
        try:
            shard.size = os.fstat(shard._fd).st_size
            shard._load()
        except BaseException:
            shard.close()
            raise
        return shard

    @classmethod
    def ranged(cls, size: int, fetch: Callable[[int, int], bytes]) -> Shard:
        """Open a shard of `size` bytes far away, of which `fetch(offset, length)` gives a part.

        It is called once for the last 64 KiB, again where the footer is larger, and then once for each sequence
        read; the head stays unread (SPEC 8.6). That the bytes are those of a digest cannot be told from parts.
        """
        shard = cls.__new__(cls)
        shard._fetch, shard.size = fetch, size
        shard._load()
        return shard

    @property
    def num_sequences(self) -> int:
        """Sequences in the shard."""
        return len(self.index)

    @property
    def num_positions(self) -> int:
        """Tokens in the shard."""
        return int(self.index["positions"].sum())

    def read(self, number: int) -> ScoredSequence:
        """Return sequence `number`, 0-based.

        Raises:
            CorruptFrame: its bytes are damaged or break a rule (SPEC 4).
        """
        columns = self.read_columns(number)
        return ScoredSequence(
            input_ids_L=columns["input_ids"],
            rows=Rows(
                token_ids_PK=columns["token_ids"],
                logprobs_PK=columns["logprobs"],
                log_tail_mass_P=columns["log_tail_mass"],
                logsumexp_P=columns.get("logsumexp"),
                entropy_P=columns.get("entropy"),
                tail_token_ids_PN=columns.get("tail_token_ids"),
            ),
            loss_mask_L=columns["loss_mask"],
            segment_ids_L=columns.get("segment_ids"),
        )

    def read_columns(self, number: int, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Return these columns of sequence `number` (default: all that are known); the others are not decompressed.

        The arrays are those of `Rows` and `ScoredSequence`; a column that was not asked for has no key. What a
        column holds never depends on the others asked for, but rules that bind two columns are checked only where
        both are read, and the sequence's key only with `input_ids` (SPEC 4.10).

        Raises:
            ColumnError: the shard has no such column.
            CorruptFrame: the bytes of the sequence are damaged, or these columns break a rule (SPEC 4).
        """
        if names is None:
            names = [column.name for column in self.metadata.columns if column.is_known]
        frame = self._frame(number)
        columns = new_columns(names, self.metadata, self.length(number))
        self._decode(number, frame, columns)
        return columns

    def read_into(self, number: int, columns: Mapping[str, Array]) -> None:
        """Read sequence `number` into these arrays, only the columns that they are for; see `read_columns`.

        They have the shapes and types of what `read_columns` returns, in any memory layout. After an error they
        hold PAD_ID, False, -inf and NaN: every row is absent.

        Raises:
            ColumnError: the shard has no such column, or its array does not fit; nothing was written.
            CorruptFrame: the bytes of the sequence are damaged, or these columns break a rule (SPEC 4).
        """
        check_columns(columns, self.metadata, self.length(number))
        try:
            self._decode(number, self._frame(number), columns)
        except BaseException:
            blank(columns)
            raise

    def length(self, number: int) -> int:
        """Return how many tokens sequence `number` has, without reading it."""
        return int(self._entry(number)["positions"])

    def column_bytes(self) -> dict[str, int]:
        """Return the compressed size of each column, over all sequences."""
        totals = {column.name: 0 for column in self.metadata.columns}
        for number in range(self.num_sequences):
            parts = split_frame(self._frame(number), self.metadata, self.length(number))
            for name, streams in parts.items():
                totals[name] += sum(len(stream) for stream in streams)
        return totals

    def find(self, key: bytes) -> list[int]:
        """Return the numbers of the sequences with this content key; a data set may repeat a text."""
        return np.flatnonzero(self.index["key"] == np.void(key[:8])).tolist()

    def __iter__(self) -> Iterator[ScoredSequence]:
        return (self.read(number) for number in range(len(self.index)))

    def verify(self) -> None:
        """Read everything, and check the rules that a reader leaves out for speed (SPEC 4.4, 4.7).

        Raises:
            CorruptFrame: the first sequence that breaks a rule.
        """
        for number, sequence in enumerate(self):
            rows = sequence.rows
            filled_PK = np.where(rows.token_ids_PK < 0, PAD_CODE + np.arange(rows.k), rows.token_ids_PK)
            if (np.diff(np.sort(filled_PK, axis=1), axis=1) == 0).any():
                raise CorruptFrame(f"a row of sequence {number} names a token twice (SPEC 4.4)")
            tail_PN = rows.tail_token_ids_PN
            if tail_PN is not None:
                drawn_PN = np.where(tail_PN < 0, -2, tail_PN)
                if any((drawn_PN[:, j, None] == rows.token_ids_PK).any() for j in range(rows.tail_samples)):
                    raise CorruptFrame(f"a tail sample of sequence {number} is in its row's support (SPEC 4.7)")

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self.close()

    def _entry(self, number: int) -> np.void:
        if not 0 <= number < len(self.index):
            raise IndexError(f"sequence {number} of a shard of {len(self.index)}")
        entry: np.void = self.index[number]
        return entry

    def _decode(self, number: int, frame: bytes, columns: Mapping[str, Array]) -> None:
        self._decoder.decode(frame, self.length(number), columns)
        if "input_ids" in columns and content_key(columns["input_ids"])[:8] != self.index["key"][number].tobytes():
            raise CorruptFrame(f"sequence {number} holds other tokens than the index says (SPEC 7.2)")

    def _frame(self, number: int) -> bytes:
        entry = self._entry(number)
        frame = self._read(int(entry["offset"]), int(entry["bytes"]))
        if xxhash.xxh3_64_intdigest(frame) != int(entry["xxh3"]):
            raise CorruptFrame(f"sequence {number} does not match its checksum (SPEC 7.3)")
        return frame

    def _read(self, offset: int, length: int) -> bytes:
        if self._fetch is not None:
            data = self._fetch(offset, length)
        else:
            data = self._data[offset : offset + length] if self._fd is None else os.pread(self._fd, length, offset)
        if len(data) != length:
            raise TruncatedShard(f"{length} bytes at {offset} are not all there: got {len(data)} (SPEC 8.2)")
        return data

    def _load(self) -> None:
        head = None if self._fetch is not None else check_head(self._read(0, min(HEADER_SIZE, self.size)))
        tail_bytes = min(TAIL_READ_BYTES, self.size)
        tail = self._read(self.size - tail_bytes, tail_bytes)
        trailer = Trailer.from_bytes(tail[-TRAILER_SIZE:], self.size, head)
        if (missing := trailer.footer_bytes + TRAILER_SIZE - len(tail)) > 0:
            tail = self._read(trailer.offset, missing) + tail
        footer = Footer.from_bytes(tail[-TRAILER_SIZE - trailer.footer_bytes : -TRAILER_SIZE], trailer)
        self.metadata, self.index, self.table = footer.metadata, footer.index, footer.table
        self._decoder = FrameDecoder(footer.metadata, footer.table)
