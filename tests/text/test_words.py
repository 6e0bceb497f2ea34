"""Row 86: Chinese by characters and by words: the same text in fewer tokens with words, and the text comes back."""

import gzip
import math
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.text import Tokenizer, train_characters, train_words
from headway.text.training import RESERVED
from tests.data import data_path

LINES = [
    "宝玉看罢，笑道：“这个妹妹我曾见过的。”",
    "贾母笑道：“可又是胡说，你又何曾见过他？”",
    "宝玉笑道：“虽然未曾见过他，然我看着面善。”",
    "宝玉便走近黛玉身边坐下，又细细打量一番，the cat sat",
]
DICTIONARY = {"宝玉": 90, "黛玉": 80, "笑道": 70, "妹妹": 60, "见过": 50, "何曾见过": 1, "妹": 5}
NOT_FILLED = "train_(words|characters). the texts gave"
pytestmark = pytest.mark.filterwarnings(f"ignore:{NOT_FILLED}:UserWarning")


def words(**options: object) -> Tokenizer:
    return train_words(LINES, 600, **options)  # type: ignore[arg-type]


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", NOT_FILLED)
    CHARACTERS, WORDS, CUT_BY_A_DICTIONARY = (
        train_characters(LINES, 600),
        words(),
        words(dictionary=DICTIONARY),
    )
ALL = [CHARACTERS, WORDS, CUT_BY_A_DICTIONARY]
TEXT = st.text(st.sampled_from("".join(LINES) + "龘 \n\x00▁[]CLS<0x41>🙂é"), max_size=40)


@given(TEXT | st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_every_text_comes_back(text: str) -> None:
    for tokenizer in ALL:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, tokenizer.encode(text)), stream.flush()]) == text


@given(st.text(st.sampled_from("".join(LINES)), max_size=60))
def test_row_86_words_are_never_more_tokens_than_characters(text: str) -> None:
    by_character = len(CHARACTERS.encode(text))
    assert len(text) + 2 == by_character
    assert len(WORDS.encode(text)) <= by_character
    assert len(CUT_BY_A_DICTIONARY.encode(text)) <= by_character


def test_words_of_the_texts_are_tokens() -> None:
    pieces = [WORDS.token(i) for i in WORDS.encode("宝玉笑道，看着", bos=False)]
    assert pieces == ["宝玉", "笑道", "，", "看", "着"]
    assert len(WORDS.encode(LINES[0])) < len(CHARACTERS.encode(LINES[0]))


def best(text: str, weight: dict[str, int]) -> float:
    """Returns the greatest sum of logarithms of frequencies over all cuts, by trying every cut."""
    total = sum(weight.values())
    if not text:
        return 0.0
    return max(
        math.log(weight[text[:n]] / total) + best(text[n:], weight)
        for n in range(1, len(text) + 1)
        if text[:n] in weight
    )


@given(st.text(st.sampled_from("宝玉黛笑道妹见过何曾"), max_size=9))
def test_the_cut_is_the_most_probable_one(text: str) -> None:
    from headway.text.training import _backend

    weight = {**dict.fromkeys("宝玉黛笑道妹见过何曾", 3), **DICTIONARY}
    backend, total = _backend(weight), sum(weight.values())
    tokens = backend.encode(text).tokens
    assert "".join(tokens) == text
    assert sum(math.log(weight[w] / total) for w in tokens) == pytest.approx(best(text, weight), abs=1e-6)


def test_control_tokens_cannot_be_typed() -> None:
    for tokenizer in ALL:
        for name in RESERVED:
            ids = tokenizer.encode(f"宝{name}玉", bos=False)
            assert not tokenizer.special_ids & set(ids)
            assert tokenizer.decode(ids) == f"宝{name}玉"
        assert tokenizer.encode("[MASK]", bos=False, special=True) == [tokenizer.mask]
        assert (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 1, 2, 3, 4)


def test_pairs_are_bert_s() -> None:
    assert CHARACTERS.inputs([("宝", "玉")])[0].token_types == [0, 0, 0, 1, 1]


def test_training_does_not_depend_on_the_order_of_texts() -> None:
    for trained, train in ((CHARACTERS, train_characters), (WORDS, train_words)):
        assert train(iter(LINES[::-1]), 600).fingerprint == trained.fingerprint
    assert words(dictionary=DICTIONARY).fingerprint == CUT_BY_A_DICTIONARY.fingerprint


def test_what_we_save_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for tokenizer in ALL:
        tokenizer.save(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for text in (*LINES, "", "龘 <0x41> hello\n\x00"):
            assert theirs(text)["input_ids"] == tokenizer.encode(text)
        again = Tokenizer.load(tmp_path)
        assert again.fingerprint == tokenizer.fingerprint
        assert (again.mask, again.cls, again.encode(LINES[0])) == (4, 2, tokenizer.encode(LINES[0]))


def test_too_few_ids_and_too_few_texts() -> None:
    for train in (train_characters, train_words):
        with pytest.raises(ConfigError, match=r"vocab_size 261 is too small: 5 special .* need 261"):
            train(LINES, 261)
    with pytest.raises(ConfigError, match="the dictionary is empty"):
        train_words(LINES, 600, dictionary={})
    assert train_words(LINES, 271).vocab_size == 271  # the ten most frequent characters, no words


@pytest.mark.filterwarnings("default:train_words")
def test_a_vocabulary_that_is_not_filled_is_said() -> None:
    with pytest.warns(UserWarning, match=r"train_words: the texts gave \d+ tokens, not 600"):
        words()


@pytest.mark.slow
def test_a_novel_in_fewer_tokens_by_words() -> None:
    """Words from the first half of 红楼梦, counted on the second half: fewer tokens, and the text comes back."""
    file = data_path("chinese/hongloumeng.txt.gz")
    with gzip.open(file, "rt", encoding="utf-8-sig") as stream:
        lines = stream.read().split("\n")
    half = len(lines) // 2
    by_character = train_characters(lines[:half], 20_000)
    by_word = train_words(lines[:half], 20_000)
    second_half = "\n".join(lines[half:])
    n, m = (len(tokenizer.encode(second_half)) for tokenizer in (by_character, by_word))
    print(f"{len(second_half):,} characters: {n:,} tokens by characters, {m:,} by words")
    assert by_word.decode(by_word.encode(second_half)) == second_half
    assert m < 0.85 * n
