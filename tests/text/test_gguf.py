"""Tokenizers in GGUF metadata: written and read again they give the same ids on any text; what has no key is
refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from headway.errors import DataError
from headway.text import Tokenizer, gguf
from headway.text.rules import RULES, SPLIT, split_by
from headway.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, build, read_model
from headway.text.vocabulary import SPACE
from tests.data import data_path
from tests.text.conftest import byte_level, sentencepiece, word_piece
from tests.text.folders import TEXTS
from tests.text.folders import pieces as folder_pieces

HOSTILE = [
    *TEXTS,
    "<s>a</s>",
    "<|user|>hi<|reply|>",
    "<0x41>",
    "[PAD400]",
    "▁▁ the▁cat",
    "</s",
    "\U0010ffff\x00",
]
KINDS = {"byte level": byte_level, "pieces": sentencepiece}
PUBLISHED = {
    "stories": "small/stories_tok512.bin",
    "tiktoken": "small/torchtune_tiktoken_small.model",
    "llama 2": "llama2/tokenizer.model",
    "llama 3": "llama3/tokenizer.model",
}
SLOW = {"llama 2", "llama 3"}


def through(tokenizer: Tokenizer, rows: int = 0) -> Tokenizer:
    """Returns the tokenizer that is read from the keys that this one writes."""
    keys = tokenizer.gguf_metadata(rows or tokenizer.vocab_size + 7)
    backend, arguments = gguf.read(keys, Path("m.gguf"))
    return Tokenizer(backend, **arguments)


def same(ours: Tokenizer, theirs: Tokenizer, text: str) -> None:
    for special in (False, True):
        assert ours.encode(text, special=special) == theirs.encode(text, special=special)
    ids = theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, special=True) == theirs.decode(ids, special=True)


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer]:
    tokenizer = KINDS[request.param]()
    return tokenizer, through(tokenizer)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(HOSTILE))
def test_the_same_ids_on_any_text(both: tuple[Tokenizer, Tokenizer], text: str) -> None:
    same(both[1], both[0], text)


def test_the_same_special_tokens(both: tuple[Tokenizer, Tokenizer]) -> None:
    first, second = both
    assert (second.bos, second.eos, second.unk, second.pad) == (first.bos, first.eos, first.unk, first.pad)
    assert second.special_ids == first.special_ids
    assert (second.template.prefix, second.template.suffix) == (first.template.prefix, first.template.suffix)
    assert second.vocab_size == first.vocab_size


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PUBLISHED]
)
def test_published_tokenizers_are_the_same(name: str) -> None:
    """LLaMA 2's spaces have equal scores; LLaMA 3 takes words that are tokens as a whole."""
    tokenizer = Tokenizer.load(data_path(f"tokenizers/{PUBLISHED[name]}"))
    other = through(tokenizer)
    for text in HOSTILE:
        same(other, tokenizer, text)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_recognized_and_read(rule: str) -> None:
    """A tokenizer with a rule is written under the rule's name, or under that of an equal rule."""
    keys = byte_level().gguf_metadata(400) | {"tokenizer.ggml.pre": rule}
    backend, arguments = gguf.read(keys, Path("m.gguf"))
    tokenizer = Tokenizer(backend, **arguments)
    written = tokenizer.gguf_metadata(400)["tokenizer.ggml.pre"]
    assert RULES[written].whole == RULES[rule].whole
    for text in HOSTILE:
        same(through(tokenizer, 400), tokenizer, text)


def test_llama_3_begins_texts_with_bos_where_the_file_does_not_say() -> None:
    keys = byte_level().gguf_metadata(400)
    keys.pop("tokenizer.ggml.add_bos_token")
    for rule, begins in (("llama-bpe", True), ("dbrx", False)):
        backend, arguments = gguf.read(keys | {"tokenizer.ggml.pre": rule}, Path("m.gguf"))
        assert (Tokenizer(backend, **arguments).encode("the")[0] == 0) == begins


def test_an_unknown_token_of_a_byte_level_file_is_not_made_of_text() -> None:
    """Text is never this token, as it is never a control token: llama.cpp's LLAMA_TOKEN_TYPE_UNKNOWN."""
    keys = byte_level().gguf_metadata(400)
    place = keys["tokenizer.ggml.tokens"].index("<|user|>")
    keys["tokenizer.ggml.token_type"][place] = UNKNOWN
    backend, arguments = gguf.read(keys, Path("m.gguf"))
    tokenizer = Tokenizer(backend, **arguments)
    same(tokenizer, byte_level(), "a<|user|>b")
    assert place not in tokenizer.encode("a<|user|>b")
    assert place in tokenizer.encode("a<|user|>b", special=True)


@pytest.mark.parametrize("place", [0, 3])
def test_without_a_key_the_unknown_piece_is_that_of_its_type(place: int) -> None:
    keys = sentencepiece().gguf_metadata(300)
    del keys["tokenizer.ggml.unknown_token_id"]
    for name in ("tokens", "token_type", "scores"):
        values = keys[f"tokenizer.ggml.{name}"]
        values.insert(place, values.pop(0))
    keys |= {f"tokenizer.ggml.{name}_token_id": i - (place > 0) for name, i in (("bos", 1), ("eos", 2))}
    model = json.loads(gguf.read(keys, Path("m.gguf"))[0].to_str())["model"]
    assert (model["unk_token"], model["vocab"]["<unk>"]) == ("<unk>", place)


def read_keys(keys: dict[str, Any]) -> Tokenizer:
    backend, arguments = gguf.read(
        {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, Path("m.gguf")
    )
    return Tokenizer(backend, **arguments)


def test_words_of_bert_are_read() -> None:
    """In GGUF pieces that begin words have a mark, and pieces within words have none."""
    tokenizer = word_piece()
    names = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    controls = [i in tokenizer.special_ids for i in range(len(names))]
    tokens = [
        name if control else name.removeprefix("##") if name.startswith("##") else f"{SPACE}{name}"
        for name, control in zip(names, controls, strict=True)
    ]
    kinds = [CONTROL if control else NORMAL for control in controls]
    keys = {
        "model": "bert",
        "tokens": tokens,
        "token_type": kinds,
        "cls_token_id": 1,
        "seperator_token_id": 2,
    }
    other = read_keys(keys)
    for text in HOSTILE:
        assert other.encode(text, bos=False, eos=False) == tokenizer.encode(text, bos=False, eos=False)
    assert (other.cls, other.sep, other.unk, other.encode("the cats")) == (1, 2, 0, [1, 3, 4, 6, 2])
    assert read_keys({**keys, "normalizer.lowercase": False}).encode("The", bos=False, eos=False) == [0]


@pytest.mark.parametrize("kind", ["t5", "gemma4"])
def test_pieces_with_probabilities_or_merges_are_read(kind: str) -> None:
    pieces = read_model(Path("m.model"), folder_pieces("unigram" if kind == "t5" else "bpe"))
    tokenizer = Tokenizer(build(pieces), bos=1, eos=2)
    model = json.loads(tokenizer.backend.to_str())["model"]
    extra = (
        {"scores": pieces.scores}
        if kind == "t5"
        else {"merges": [" ".join(pair) for pair in model["merges"]]}
    )
    keys = {
        "model": kind,
        "tokens": pieces.pieces,
        "token_type": pieces.kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": pieces.dummy_prefix,
        "remove_extra_whitespaces": pieces.squeeze_spaces,
        "precompiled_charsmap": list(pieces.charsmap),
        "add_bos_token": True,
    }
    other = read_keys(keys | extra)
    for text in HOSTILE:
        assert other.encode(text, eos=False) == tokenizer.encode(text, eos=False)
        assert other.decode(other.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (other.encode("the")[-1] == 2) == (kind == "t5")


def test_chat_template_and_user_defined_tokens_go_along() -> None:
    tokenizer = byte_level()
    tokenizer.backend.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer = Tokenizer(tokenizer.backend, bos=0, eos=1).with_chat_template("chatml")
    other = through(tokenizer)
    assert other.chat_template.source == tokenizer.chat_template.source
    assert other.encode("a<tool>b") == tokenizer.encode("a<tool>b")
    assert other.special_ids == tokenizer.special_ids


def add_spaced(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return Tokenizer(tokenizer.backend, bos=0, eos=1)


def split_otherwise(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.backend.pre_tokenizer = split_by(SPLIT.replace("{1,3}", "{1,2}"))
    return tokenizer


def squeezed(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (word_piece, "this tokenizer is of type WordPiece"),
        (lambda: add_spaced(byte_level()), "added tokens"),
        (lambda: split_otherwise(byte_level()), "pre-tokenizer has no known name in GGUF"),
        (lambda: squeezed(sentencepiece()), "rule to split text"),
    ],
)
def test_what_has_no_key_is_refused_by_name(tokenizer, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokenizer().gguf_metadata(1000)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "rwkv", "tokenizer.ggml.model has the unsupported value 'rwkv'"),
        ("model", "none", "the file holds no tokenizer"),
        ("pre", "kimi-k2", "tokenizer.ggml.pre has the unsupported value 'kimi-k2'"),
        ("tokens", ["a", "b"], "token_type must list"),
        ("tokens", ["a"] * 400, "tokens lists the same text twice"),
        ("tokens", [""] * 400, "must be a list of texts, none of them empty"),
        ("tokens", [1, 2], "must be a list of texts"),
        ("token_type", [9] * 400, "a type from 1 to 6"),
        ("merges", ["a b c"], "two tokens separated by a space, got 'a b c'"),
        ("merges", ["猫 狗"], "of which a part or the result is not a token"),
        ("bos_token_id", 400, "must be the id of one of"),
        ("add_bos_token", "yes", "must be true or false"),
        ("cls_token_id", 400, "must be the id of one of"),
    ],
)
def test_keys_that_are_wrong_are_named(key: str, value: object, message: str) -> None:
    keys = byte_level().gguf_metadata(400) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(DataError, match=message):
        gguf.read(keys, Path("m.gguf"))
