"""Decoding token by token: the deltas join to the full decoding, and none ends inside a character."""

from hypothesis import given
from hypothesis import strategies as st

from headway.text import Tokenizer
from tests.text.conftest import KINDS

TOKENIZERS = {name: make() for name, make in KINDS.items()}


def deltas(tokenizer: Tokenizer, ids: list[int], after: list[int] | None = None) -> list[str]:
    stream = tokenizer.stream(after=after or [])
    return [*map(stream.push, ids), stream.flush()]


@given(st.data(), st.sampled_from(sorted(TOKENIZERS)))
def test_deltas_are_the_full_text(data: st.DataObject, kind: str) -> None:
    """Any ids, so also byte sequences that are not UTF-8, special tokens, and half characters."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    after = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5))
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(deltas(tokenizer, ids, after)) == tokenizer.decode(ids, after=after)


@given(st.binary(max_size=40))
def test_random_bytes(content: bytes) -> None:
    for tokenizer in (TOKENIZERS["byte_level"], TOKENIZERS["sentencepiece"]):
        table = tokenizer.table
        assert table is not None
        of_byte = {b: i for i, b in table.bytes_of.items() if len(b) == 1}
        ids = [of_byte[bytes([b])] for b in content]
        expected = content.decode("utf-8", "replace")
        if table.strips_space:
            expected = expected.removeprefix(" ")
        assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == expected


@given(st.text(st.sampled_from("a 猫狗🙂🧑‍🚀é한글\n"), max_size=30))
def test_no_delta_ends_inside_a_character(text: str) -> None:
    for tokenizer in (TOKENIZERS["byte_level"], TOKENIZERS["sentencepiece"]):
        parts = deltas(tokenizer, tokenizer.encode(text))
        assert all("\ufffd" not in part for part in parts)
        assert "".join(parts) == text
        assert parts[-1] == ""  # whole characters are never held back


def test_a_character_is_shown_as_soon_as_it_is_whole() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [3 + b for b in "🙂x".encode()]
    assert deltas(tokenizer, ids) == ["", "", "", "🙂", "x", ""]
    assert deltas(tokenizer, ids[:2]) == ["", "", "\ufffd"]


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    prompt, continuation = tokenizer.encode("the"), tokenizer.encode(" cat", bos=False)[1:]
    assert tokenizer.decode(continuation) == "cat"
    assert tokenizer.decode(continuation, after=prompt) == " cat"
    assert tokenizer.decode(continuation, after=[1]) == "cat"


def test_special_tokens_are_silent_unless_asked_for() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [0, *tokenizer.encode("cat", bos=False), 1]
    assert tokenizer.decode(ids) == "cat"
    assert tokenizer.decode(ids, special=True) == "<|begin|>cat<|end|>"
