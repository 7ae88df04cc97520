"""Every constant of the shard format, with its clause in SPEC.md."""

from __future__ import annotations

HEADER_MAGIC = b"TKCS"  # 3.1
TRAILER_MAGIC = b"TKCE"  # 8.1
FILE_SUFFIX = ".tkc"  # 1

FEATURE_REMAP = 1 << 0  # 3.3: ids are coded by a table
KNOWN_FEATURES = FEATURE_REMAP  # 3.3

HEADER_FORMAT = "<4sHHII"  # 3: magic, major, minor, required features, reserved
FRAME_FORMAT = "<IHH"  # 4.1: positions, streams, reserved
TRAILER_FORMAT = "<QIIQQQQIHHI4s"  # 8

PAD_CODE = 0xFFFFFF  # 4.4, 4.7: an id that is none
ZSTD_LEVEL = 1  # 4.2

MAX_METADATA_BYTES = 1 << 16  # 9
MAX_VOCAB = (1 << 24) - 1  # 9
MAX_K = 4096  # 9
MAX_TAIL_SAMPLES = 4096  # 9
MAX_STREAMS = 256  # 9
MAX_SEQUENCES = 1 << 24  # 9
MAX_SEQUENCE_POSITIONS = 1 << 22  # 9
MAX_PLANE_BYTES = 1 << 30  # 9
MAX_WINDOW_BYTES = 1 << 23  # 9
