"""The text of a generation: what follows the prompt, up to EOS or a stop string."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.generate import Generation, GenerationConfig, Sampling, generate
from headway.text import Tokenizer
from tests.generate.plain import HOT, MODEL, PROMPTS, TOKENIZER
from tests.text.conftest import sentencepiece


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tokenizer", [TOKENIZER, sentencepiece()], ids=["byte_level", "sentencepiece"])
def test_text_is_what_follows_the_prompt(tokenizer: Tokenizer, sampling: Sampling) -> None:
    prompts = [tokenizer.encode("the cat"), tokenizer.encode("a"), [0]]
    settings = GenerationConfig(
        max_new_tokens=20, sampling=sampling, forbidden=[*range(3), *tokenizer.unused_ids(330)]
    )
    for generation, prompt in zip(
        generate(MODEL, prompts, settings, tokenizer=tokenizer), prompts, strict=True
    ):
        assert generation.text == str(generation) == tokenizer.decode(generation.ids, after=prompt)
        if "\ufffd" not in generation.text:
            assert tokenizer.decode(prompt) + generation.text == tokenizer.decode([*prompt, *generation.ids])


def test_a_first_word_keeps_its_space() -> None:
    """SentencePiece strips the leading space of a text, but not that of a continuation."""
    tokenizer = sentencepiece()
    (space,) = [i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == "\u2581the"]
    settings = GenerationConfig(max_new_tokens=1, forbidden=[i for i in range(330) if i != space])
    texts = [generate(MODEL, [p], settings, tokenizer=tokenizer)[0].text for p in ([1], [1, space])]
    assert texts == ["the", " the"]


def test_eos_ends_a_row_and_is_not_text() -> None:
    free = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=10))[0].ids
    eos = free[4]
    generation = generate(
        MODEL, PROMPTS[:1], GenerationConfig(max_new_tokens=10, eos=[999999, eos]), tokenizer=TOKENIZER
    )[0]
    first = free.index(eos)
    assert (generation.ids, generation.finish_reason) == (free[: first + 1], "eos")
    assert generation.text == TOKENIZER.decode(free[:first])


@functools.cache
def free_text(seed: int) -> Generation:
    settings = GenerationConfig(max_new_tokens=10, sampling=HOT, seed=seed)
    return generate(MODEL, [[0, 5]], settings, tokenizer=TOKENIZER)[0]


@given(st.data())
def test_a_stop_string_wherever_tokens_split_it(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2))
    free = free_text(seed)
    begin = data.draw(st.integers(0, len(free.text) - 1))
    stop = free.text[begin : begin + data.draw(st.integers(1, 6))]
    generation = generate(
        MODEL,
        [[0, 5]],
        GenerationConfig(max_new_tokens=10, sampling=HOT, seed=seed, stop=[stop]),
        tokenizer=TOKENIZER,
    )[0]
    assert generation.finish_reason == "stop"
    assert generation.text == free.text[: free.text.index(stop)]
    assert generation.ids == free.ids[: len(generation.ids)]
    assert stop in TOKENIZER.decode(generation.ids)


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    free = free_text(0)
    settings = GenerationConfig(max_new_tokens=10, sampling=HOT, seed=0, stop=[free.text[-2:] + "never"])
    generation = generate(MODEL, [[0, 5]], settings, tokenizer=TOKENIZER)[0]
    assert (generation.text, generation.finish_reason) == (free.text, "length")
