"""Teachers are told apart by what is in their files, and tokenizers by what their ids stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import write_teacher
from tiny_server import MAX_LENGTH, VOCAB_SIZE, tiny_teacher

from teachercache.format_spec import TokenizerError, digest_file
from teachercache.format_spec.tokenizer_identity import tokenizer_digest
from teachercache.service.engine_choice import DRAWS_TAIL_SAMPLES, HEAD_DTYPE, EngineChoice
from teachercache.service.errors import UnknownTeacher, UnsupportedTeacher
from teachercache.service.settings import Settings
from teachercache.service.teachers import Teacher, Teachers, read_teacher, resolve_path

__all__ = ["tiny_teacher"]


def read(path: Path, dtype: str = "auto") -> Teacher:
    """Read a teacher without remembering digests."""
    return read_teacher("t", path, EngineChoice(dtype=dtype), digest_file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a teacher."""
    return write_teacher(tmp_path / "teacher")


def edit(path: Path, **values: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_same_files_elsewhere_are_the_same_teacher(tiny_teacher: Path, tmp_path: Path) -> None:
    teacher = read(tiny_teacher)
    assert (teacher.vocab_size, teacher.max_length, teacher.dtype) == (VOCAB_SIZE, MAX_LENGTH, "float32")
    copy = tmp_path / "copy"
    shutil.copytree(tiny_teacher, copy)
    (copy / "README.md").write_text("not part of it")
    assert read(copy).digest == teacher.digest and read(copy).tokenizer == teacher.tokenizer


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_any_file_that_can_change_a_number_makes_another_teacher(folder: Path, name: str) -> None:
    before = read(folder)
    path = folder / name
    path.write_bytes((path.read_bytes() if path.exists() else b"{}") + b"\n")
    after = read(folder)
    assert after.digest != before.digest and after.tokenizer == before.tokenizer


def test_sharded_weights_are_all_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model-2.safetensors").write_bytes(b"more")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    before = read(folder).digest
    (folder / "model-2.safetensors").write_bytes(b"less")
    assert read(folder).digest != before
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(UnsupportedTeacher, match=r"lacks model-2\.safetensors"):
        read(folder)
    index.write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(UnsupportedTeacher, match="does not name files of its folder"):
        read(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda f: edit(f / "config.json", vocab_size=None), "vocab_size None"),
        (lambda f: edit(f / "config.json", auto_map={"AutoModel": "x.Y"}), "code of its own"),
        (lambda f: edit(f / "config.json", dtype="int8"), "dtype 'int8'"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickled ones can run code"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text('{"model": []}'), "cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(folder: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(folder)
    with pytest.raises(UnsupportedTeacher, match=words):
        read(folder)


def test_the_dtype_is_the_config_s_unless_one_is_given(folder: Path) -> None:
    assert read(folder).dtype == "float32"
    edit(folder / "config.json", torch_dtype="bfloat16")
    assert read(folder).dtype == "bfloat16" and read(folder, "float16").dtype == "float16"


def test_a_text_config_inside_is_the_one_that_counts(folder: Path) -> None:
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 7, "max_position_embeddings": 9}}')
    assert (read(folder).vocab_size, read(folder).max_length) == (7, 9)


def test_teachers_are_found_by_name_and_digest(folder: Path) -> None:
    teachers = Teachers.of(Settings(teachers={"one": str(folder)}), digest_file)
    assert teachers.find("one") is teachers.find(teachers.all[0].digest)
    with pytest.raises(UnknownTeacher, match=r"no teacher 'two' on this server; it serves \['one'\]"):
        teachers.find("two")


def test_a_path_that_is_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownTeacher, match="neither a folder nor a hub id"):
        resolve_path(str(tmp_path / "missing"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnknownTeacher, match="the hub does not give it"):
        resolve_path("nobody/nothing")


def test_a_hub_id_and_its_revision_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repo: str, **options: object) -> str:
        asked.append((repo, options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert resolve_path("owner/name") == resolve_path("owner/name@abc123") == tmp_path
    assert asked == [("owner/name", None), ("owner/name", "abc123")]


def test_what_is_promised_of_engines_is_what_they_do() -> None:
    from teachercache.service.engine_choice import DTYPES as PROMISED
    from teachercache.service.engines import ENGINES
    from teachercache.service.engines.openai import OpenAIEngine
    from teachercache.service.engines.transformers import DTYPES, TransformersEngine

    assert set(ENGINES) == set(DRAWS_TAIL_SAMPLES) and set(PROMISED) == set(DTYPES)
    assert DRAWS_TAIL_SAMPLES["transformers"] is TransformersEngine.draws_tail_samples
    assert DRAWS_TAIL_SAMPLES["openai"] is OpenAIEngine.draws_tail_samples
    assert HEAD_DTYPE == "float32"


def test_a_tokenizer_that_was_saved_again_is_the_same(tiny_teacher: Path, tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_teacher)
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "other"
    tokenizer(["a", "bcd"], padding=False, truncation=True, max_length=2)
    tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != (tiny_teacher / "tokenizer.json").read_bytes()
    assert tokenizer_digest(tmp_path) == tokenizer_digest(tiny_teacher)


def test_another_token_anywhere_is_another_tokenizer(tiny_teacher: Path, tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_teacher)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(tmp_path) != tokenizer_digest(tiny_teacher)


def test_identity_is_of_ids_and_pieces_not_of_the_file(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / name).write_text(text)
        return tokenizer_digest(tmp_path)

    base = digest(
        "tokenizer.json", '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "c"}]}'
    )
    assert base == digest("tokenizer.json", '{"model": {"vocab": {"b": 1, "c": 2, "a": 0}, "merges": []}}')
    assert base == digest("tokenizer.json", '{"model": {"vocab": [["a", -1.5], ["b", 0.0], ["c", -9]]}}')
    assert base == digest("vocab.json", '{"a": 0, "b": 1, "c": 2}')
    assert base != digest("vocab.json", '{"a": 1, "b": 0, "c": 2}')
    assert digest("tokenizer.model", "x") != digest("tokenizer.model", "y")
    with pytest.raises(TokenizerError, match="cannot be read"):
        digest("vocab.json", "[1]")
    with pytest.raises(TokenizerError, match="no tokenizer"):
        digest("config.json", "{}")
