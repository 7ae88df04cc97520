import re
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from teachercache.demo import text
from teachercache.demo.text import Document


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return text.load_documents()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer of one token a character: the id is the character's code."""
    tokenizer = Tokenizer(models.BPE({chr(i): i for i in range(128)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def phrases(documents: list[Document], words: int = 13) -> set[tuple[str, ...]]:
    lists = [re.findall(r"\w+", document.text) for document in documents]
    return {tuple(some[i : i + words]) for some in lists for i in range(len(some) - words + 1)}


def test_the_corpus_is_prose_in_a_fixed_order(documents: list[Document]) -> None:
    names = [document.name for document in documents]
    assert documents == text.load_documents()
    assert names == sorted(set(names))
    assert len(documents) >= 50
    assert sum(len(document.text) for document in documents) > 300_000
    assert all(len(document.text) >= 400 for document in documents)
    words = [word for document in documents for word in document.text.split()]
    assert words.count("the") > len(words) / 50


def test_clean_drops_what_only_draws() -> None:
    drawn = (
        "Title\n*****\n\n\nSome  text.   \n+----+----+\n| a  | b  |\n|====|====|\n|    |    |\n\n   x = -1\n   ...\n"
    )
    assert text.clean(drawn) == "Title\n\nSome  text.\n| a  | b  |\n\n   x = -1\n   ..."


def test_a_passage_stays_with_the_shortest_topic_that_holds_it() -> None:
    passage = "A passage that is long enough to count.\n\nFor example:\n\n   x = 1"
    short = Document("short", passage)
    long = Document(
        "long", "Before it.\n\n" + passage.replace("   x", "      x") + "\n\nThen:\n\nFor example:\n\nAfter it."
    )
    kept = text.without_repeats([long, short])
    assert kept == [short, Document("long", "Before it.\n\nThen:\n\nFor example:\n\nAfter it.")]


def test_train_and_heldout_share_no_document_and_no_passage(documents: list[Document]) -> None:
    train, heldout = text.split(documents)
    assert sorted([*train, *heldout], key=lambda document: document.name) == documents
    assert not phrases(train) & phrases(heldout)


def test_a_document_never_changes_sides(documents: list[Document]) -> None:
    train, heldout = text.split(documents)
    assert text.split(reversed(documents)) == (train, heldout)
    fewer_train, fewer_heldout = text.split(documents[::2])
    assert fewer_train == [document for document in train if document in documents[::2]]
    assert fewer_heldout == [document for document in heldout if document in documents[::2]]
    # a known answer: names decide, whatever the Python
    assert {"try", "operator-summary", "numeric-types"} <= {document.name for document in heldout}
    assert text.split(documents, seed=1) != (train, heldout)


def test_the_fraction_is_honoured(documents: list[Document]) -> None:
    assert text.split(documents, 0.0)[1] == []
    assert text.split(documents, 1.0)[0] == []
    sizes = [len(text.split(documents, fraction)[1]) for fraction in (0.1, 0.3, 0.5, 0.9)]
    assert all(small < large for small, large in pairwise(sizes))
    with pytest.raises(ValueError, match=r"heldout_fraction is 1\.5"):
        text.split(documents, 1.5)


def test_training_documents_come_from_all_over_the_alphabet(documents: list[Document]) -> None:
    train, _ = text.split(documents)
    places = [documents.index(document) / len(documents) for document in train[:16]]
    assert min(places) < 0.25
    assert max(places) > 0.75
    assert 0.3 < sum(places) / len(places) < 0.7


def test_sequences_do_not_span_texts(tokenizer: Tokenizer) -> None:
    sequences = text.pack_tokens(["a" * 100, "b" * 71, "c" * 31], tokenizer, 64, 10_000)
    assert ["".join(map(chr, sequence)) for sequence in sequences] == ["a" * 64, "a" * 36, "b" * 64]


@pytest.mark.parametrize(
    ("max_tokens", "lengths"), [(0, []), (63, []), (64, [64]), (163, [64, 36]), (164, [64, 36, 64])]
)
def test_packing_stops_at_max_tokens(tokenizer: Tokenizer, max_tokens: int, lengths: list[int]) -> None:
    assert [len(s) for s in text.pack_tokens(["a" * 100, "b" * 200], tokenizer, 64, max_tokens)] == lengths


@pytest.mark.parametrize("min_length", [1, 65])
def test_a_minimum_that_makes_no_sense_is_refused(tokenizer: Tokenizer, min_length: int) -> None:
    with pytest.raises(ValueError, match=f"min_length is {min_length}, must be between 2 and sequence_length = 64"):
        text.pack_tokens([], tokenizer, 64, 100, min_length=min_length)
