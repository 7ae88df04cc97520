"""The teachers that a server serves, told apart by what is in their files; nothing of them is loaded here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..format_spec import FormatError, canonical_json, digest_bytes, tokenizer_digest
from ..format_spec.request import AUTO, MAX_SHARD_POSITIONS
from ..format_spec.tokenizer_identity import TOKENIZER_FILES
from .engine_choice import DTYPES, EngineChoice
from .errors import MissingExtra, UnknownTeacher, UnsupportedTeacher
from .settings import Settings

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")

DigestOf = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a teacher can score, and where its tokenizer is."""

    path: Path
    vocab_size: int
    max_length: int


@dataclass(frozen=True, slots=True)
class Teacher:
    """A teacher in a local folder and how it is run.

    `digest` is that of canonical JSON with the digests of config, weights, tokenizer files and templates;
    `tokenizer` the identity that a student is compared by; `draws_tail_samples` says whether rows can have them.
    """

    name: str
    path: Path
    digest: str
    tokenizer: str
    vocab_size: int
    max_length: int
    engine: str
    dtype: str
    head_dtype: str
    draws_tail_samples: bool

    @property
    def limits(self) -> Limits:
        """What a data set is checked against."""
        return Limits(self.path, self.vocab_size, self.max_length)

    def to_json(self) -> dict[str, Any]:
        """Return what clients are told."""
        return {
            "name": self.name,
            "digest": self.digest,
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "engine": self.engine,
            "dtype": self.dtype,
            "head_dtype": self.head_dtype,
            "tail_samples": self.draws_tail_samples,
        }


class Teachers:
    """The teachers of a server, found by name or digest."""

    def __init__(self, teachers: Iterable[Teacher]) -> None:
        self.all = tuple(teachers)

    @classmethod
    def of(cls, settings: Settings, digest_of: DigestOf) -> Teachers:
        """Read the teachers that the settings name, fetching those that are hub ids."""
        choice = settings.choice
        return cls(
            read_teacher(name, resolve_path(path), choice, digest_of) for name, path in settings.teachers.items()
        )

    def find(self, name_or_digest: str) -> Teacher:
        """Return a teacher; raises UnknownTeacher."""
        for teacher in self.all:
            if name_or_digest in (teacher.name, teacher.digest):
                return teacher
        known = sorted(teacher.name for teacher in self.all)
        raise UnknownTeacher(f"there is no teacher {name_or_digest!r} on this server; it serves {known}")


def resolve_path(path: str) -> Path:
    """Return the local folder of a path or hub id (`owner/name` or `owner/name@revision`), fetching the latter.

    Raises:
        UnknownTeacher: there is no such folder, and no such model can be fetched.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    match = _HUB_ID.fullmatch(path)
    if match is None:
        raise UnknownTeacher(f"{path} is neither a folder nor a hub id (owner/name)")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{path} is no folder, and huggingface_hub is not installed to fetch it") from error
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=patterns)).resolve()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnknownTeacher(f"{path} is not a folder here, and the hub does not give it: {reason}") from error


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """What a teacher's config.json says of it."""

    vocab_size: int
    max_length: int
    stated_dtypes: tuple[object, ...]


def read_config(path: Path) -> TeacherConfig:
    """Read the config of a Hugging Face folder; raises UnsupportedTeacher."""
    config = _read_json(path / "config.json")
    if "auto_map" in config:
        raise UnsupportedTeacher(f"{path} brings code of its own (auto_map), which is not run")
    text_config = config.get("text_config", config)
    max_length = text_config.get("max_position_embeddings") or MAX_SHARD_POSITIONS
    vocab_size = text_config.get("vocab_size")
    for what, value in (("vocab_size", vocab_size), ("max_position_embeddings", max_length)):
        if not isinstance(value, int) or value < 1:
            raise UnsupportedTeacher(f"{path / 'config.json'} has {what} {value!r}, not a positive integer")
    stated = tuple(part.get("dtype") or part.get("torch_dtype") for part in (text_config, config))
    return TeacherConfig(vocab_size, max_length, stated)


def read_teacher(name: str, path: Path, choice: EngineChoice, digest_of: DigestOf) -> Teacher:
    """Return the teacher in a Hugging Face folder, as the chosen engine runs it.

    `digest_of` gives the digest of a file, and may remember it.

    Raises:
        UnsupportedTeacher: files are missing or damaged, or it would need pickled weights or code of its own.
    """
    config = read_config(path)
    try:
        tokenizer = tokenizer_digest(path)
    except FormatError as error:
        raise UnsupportedTeacher(str(error)) from error
    files = ["config.json", *_weights(path)]
    files += [file for file in (*TOKENIZER_FILES, *TEMPLATE_FILES) if (path / file).is_file()]
    # file names as values: a name need not be ASCII, as keys of canonical JSON are
    parts = [[file, digest_of(path / file)] for file in sorted(files)]
    dtype = _dtype(choice.dtype, *config.stated_dtypes)
    return Teacher(
        name=name,
        path=path,
        digest=digest_bytes(canonical_json(parts)),
        tokenizer=tokenizer,
        vocab_size=config.vocab_size,
        max_length=min(
            config.max_length, choice.engine_args.get("max_model_len") or config.max_length, MAX_SHARD_POSITIONS
        ),
        engine=choice.engine,
        dtype=dtype,
        head_dtype=choice.head_dtype_of(dtype),
        draws_tail_samples=choice.draws_tail_samples,
    )


def _weights(path: Path) -> list[str]:
    if (path / WEIGHTS_INDEX).is_file():
        names = _read_json(path / WEIGHTS_INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(Path(str(file)).name == file for file in names.values()):
            raise UnsupportedTeacher(f"{path / WEIGHTS_INDEX} does not name files of its folder")
        files = [WEIGHTS_INDEX, *sorted(set(names.values()))]
    else:
        files = [WEIGHTS]
    if missing := [file for file in files if not (path / file).is_file()]:
        raise UnsupportedTeacher(
            f"{path} lacks {missing[0]}; only safetensors weights are read, for pickled ones can run code"
        )
    return files


def _dtype(dtype: str, *stated: object) -> str:
    if dtype == AUTO:
        dtype = next((str(value) for value in stated if value), "float32")
    if dtype not in DTYPES:
        raise UnsupportedTeacher(f"dtype {dtype!r} is not one of {list(DTYPES)}; set one with --dtype")
    return dtype


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UnsupportedTeacher(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedTeacher(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedTeacher(f"{path} is not a JSON object")
    return value
