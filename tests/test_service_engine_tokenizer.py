"""Text and chat messages become what the teacher's own tokenizer and template say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors

from teachercache.format_spec import Code, Example
from teachercache.service.engines.errors import UntokenizableExample
from teachercache.service.engines.tokenizer import Tokenizer
from teachercache.service.errors import UnsupportedTeacher

WORDS = ["<s>", "<unk>", "a", "b", "c", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
CONVERSATION = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """Save a tokenizer of words that puts <s> before a text."""
    words = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def ids_of(example: Example) -> list[int]:
    """Return the token ids of what was encoded."""
    assert example.input_ids is not None
    return [int(token) for token in example.input_ids]


def test_text_gets_the_special_tokens_that_the_tokenizer_adds(tmp_path: Path) -> None:
    encoded = Tokenizer(save_tokenizer(tmp_path, None)).encode(Example(text="b a zzz"))
    assert ids_of(encoded) == [0, 3, 2, 1] and encoded.loss_mask is None


def test_messages_go_through_the_template_and_nothing_is_added(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, TEMPLATE))
    assert ids_of(tokenizer.encode(Example(messages=CONVERSATION))) == [0, 5, 2, 3, 0, 6, 4]
    assert ids_of(tokenizer.encode(Example(messages=CONVERSATION[:1]), as_prompt=True)) == [0, 5, 2, 3, 0]


def test_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, None))
    with pytest.raises(
        UntokenizableExample, match="has no chat template: send a data set of text or input_ids"
    ) as caught:
        tokenizer.encode(Example(messages=CONVERSATION))
    assert caught.value.code is Code.INVALID_DATASET


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0]['x'].y }}", "{% if %}"]
)
def test_messages_that_the_template_refuses_are_refused(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, template))
    with pytest.raises(UntokenizableExample, match="refuses the messages"):
        tokenizer.encode(Example(messages=CONVERSATION))


def test_the_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(UntokenizableExample, match="refuses the messages"):
        tokenizer.encode(Example(messages=CONVERSATION))


@pytest.mark.parametrize("example", [Example(text=""), Example(messages=[])])
def test_what_has_no_row_is_refused(example: Example, tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, TEMPLATE))
    with pytest.raises(UntokenizableExample, match=r"becomes [01] tokens, at least 2 needed") as caught:
        tokenizer.encode(example)
    assert caught.value.code is Code.SEQUENCE_TOO_SHORT


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UntokenizableExample, match="token ids already"):
        Tokenizer(save_tokenizer(tmp_path, None)).encode(Example(input_ids=np.array([1, 2])))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTeacher, match="cannot load a tokenizer"):
        Tokenizer(tmp_path)


def test_code_in_the_teachers_folder_is_never_run(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UnsupportedTeacher):
        Tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([("user", "Hi"), ("assistant", "Yes.")], ["Yes.<|im_end|>"]),
        ([("system", "Yes."), ("user", "Yes."), ("assistant", " Yes. ")], ["Yes. <|im_end|>"]),
        ([("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "2")], ["2<|im_end|>", "2<|im_end|>"]),
        ([("user", "1"), ("assistant", ""), ("user", "3")], ["<|im_end|>"]),
        ([("assistant", "Hello"), ("user", "3")], ["Hello<|im_end|>"]),
    ],
)
def test_the_loss_mask_is_what_assistants_say(
    teacher_dir: Path, messages: list[tuple[str, str]], said: list[str]
) -> None:
    plain = tokenizers.Tokenizer.from_file(str(teacher_dir / "tokenizer.json"))
    chat = [{"role": role, "content": content} for role, content in messages]
    encoded = Tokenizer(teacher_dir).encode(Example(messages=chat))
    assert encoded.loss_mask is not None
    runs: list[list[int]] = []
    for place, (token, mine) in enumerate(zip(ids_of(encoded), encoded.loss_mask, strict=True)):
        if mine and (place == 0 or not encoded.loss_mask[place - 1]):
            runs.append([])
        if mine:
            runs[-1].append(token)
    assert [plain.decode(run, skip_special_tokens=False).strip() for run in runs] == said


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        # a template that writes earlier turns otherwise once there are later ones
        ("{{ messages | length }} {% for m in messages %}{{ m.content }} {% endfor %}", CONVERSATION, "message 1"),
        ("{% for m in messages %}{{ m.content | upper }} {% endfor %}", CONVERSATION, "cannot be told from"),
        (TEMPLATE, CONVERSATION[:1], "no message of an assistant"),
    ],
)
def test_a_conversation_without_a_clear_answer_is_refused(
    tmp_path: Path, template: str, messages: list[dict[str, str]], message: str
) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, template))
    with pytest.raises(UntokenizableExample, match=message):
        tokenizer.encode(Example(messages=messages))


def test_the_real_teachers_text_and_conversation(teacher_dir: Path) -> None:
    tokenizer = Tokenizer(teacher_dir)
    plain = tokenizers.Tokenizer.from_file(str(teacher_dir / "tokenizer.json"))
    text = "In 1969, def f(x):\n    return 'na\u00efve'"
    assert ids_of(tokenizer.encode(Example(text=text))) == plain.encode(text).ids
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = plain.decode(ids_of(tokenizer.encode(Example(messages=chat), as_prompt=True)), skip_special_tokens=False)
    system, user, prompt = rendered.split("<|im_start|>")[1:]
    assert (system, user, prompt) == ("system\nBe brief.<|im_end|>\n", "user\nHi<|im_end|>\n", "assistant\n")
