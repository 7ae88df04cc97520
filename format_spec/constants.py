"""Every constant of the shard format, with its clause in SPEC.md."""

from __future__ import annotations

HEADER_MAGIC = b"TKCS"  # 3.1
TRAILER_MAGIC = b"TKCE"  # 7.1
FILE_SUFFIX = ".tkc"  # 1

FEATURE_REMAP = 1 << 0  # 3.3, reserved for the frequency-rank table
FEATURE_PROFILES = 1 << 1  # 3.3, reserved for value profiles other than bf16
KNOWN_FEATURES = 0  # 3.3, what this version reads

HEADER_FORMAT = "<4sHHIIQQ"  # 3: magic, major, minor, features, json bytes, json xxh3, reserved
FRAME_FORMAT = "<IHH"  # 5.1: positions, streams, reserved
TRAILER_FORMAT = "<QQQQQHH4s"  # 7: index offset, sequences, positions, index xxh3, file size, major, minor, magic

PAD_CODE = 0xFFFFFF  # 5.4, 5.7: an id that is none
PAD_VALUE = 0x7F80  # 5.5: +inf on the bf16 grid
ZSTD_LEVEL = 1  # 5.2

MAX_HEADER_BYTES = 1 << 16  # 8
MAX_VOCAB = (1 << 24) - 1  # 8
MAX_K = 4096  # 8
MAX_TAIL_SAMPLES = 4096  # 8
MAX_SEQUENCES = 1 << 24  # 8
MAX_SEQUENCE_POSITIONS = 1 << 22  # 8
MAX_PLANE_BYTES = 1 << 30  # 8
MAX_WINDOW_BYTES = 1 << 23  # 8
