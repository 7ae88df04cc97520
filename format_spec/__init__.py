"""What the bytes mean: cache requests, manifests and shards."""

from .canonical import canonical_json, parse_canonical
from .codes import Code
from .dataset import Dataset, Example, read_jsonl, write_dataset
from .digest import content_key, digest_bytes, digest_file, is_digest, is_request_id
from .errors import (
    ColumnError,
    CorruptFooter,
    CorruptFrame,
    CorruptIndex,
    CorruptMetadata,
    CorruptTable,
    DatasetError,
    FormatError,
    InvalidRows,
    LimitExceeded,
    ManifestError,
    NotAShard,
    RequestError,
    ShardError,
    TeachercacheError,
    TokenizerError,
    TruncatedShard,
    UnsupportedFeature,
    UnsupportedVersion,
)
from .fingerprint import Fingerprint
from .generation import Generation
from .manifest import Manifest, Quality, QualityTally, ShardDescriptor
from .metadata import ShardMetadata
from .request import CacheRequest, Submission
from .rows import PAD_ID, Rows, ScoredSequence
from .shard import Shard, ShardWriter
from .tokenizer_identity import tokenizer_digest
from .uniforms import tail_uniforms
from .version import FORMAT_VERSION

__all__ = [
    "FORMAT_VERSION",
    "PAD_ID",
    "CacheRequest",
    "Code",
    "ColumnError",
    "CorruptFooter",
    "CorruptFrame",
    "CorruptIndex",
    "CorruptMetadata",
    "CorruptTable",
    "Dataset",
    "DatasetError",
    "Example",
    "Fingerprint",
    "FormatError",
    "Generation",
    "InvalidRows",
    "LimitExceeded",
    "Manifest",
    "ManifestError",
    "NotAShard",
    "Quality",
    "QualityTally",
    "RequestError",
    "Rows",
    "ScoredSequence",
    "Shard",
    "ShardDescriptor",
    "ShardError",
    "ShardMetadata",
    "ShardWriter",
    "Submission",
    "TeachercacheError",
    "TokenizerError",
    "TruncatedShard",
    "UnsupportedFeature",
    "UnsupportedVersion",
    "canonical_json",
    "content_key",
    "digest_bytes",
    "digest_file",
    "is_digest",
    "is_request_id",
    "parse_canonical",
    "read_jsonl",
    "tail_uniforms",
    "tokenizer_digest",
    "write_dataset",
]
