"""Constraints on the next token: rules that change a text's logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.generate import GenerationConfig, Sampling
from headway.generate.constraints import Text, banned_tokens, constrain, forced_token
from headway.generate.requests import Request


def a_text(prompt: list[int], ids: list[int], most: int) -> Text:
    return Text(Request(0, prompt, GenerationConfig(), most), ids)


EVERY = a_text([3, 4], [5, 3, 4], 9)


@pytest.mark.parametrize(
    ("rules", "text", "banned"),
    [
        (GenerationConfig(no_repeat_ngram=3), EVERY, {5}),
        (GenerationConfig(no_repeat_ngram=2), EVERY, {5}),
        (GenerationConfig(no_repeat_ngram=1), EVERY, {3, 4, 5}),
        (GenerationConfig(no_repeat_ngram=6), EVERY, set()),
        (GenerationConfig(eos=[1, 2], min_new_tokens=4), EVERY, {1, 2}),
        (GenerationConfig(eos=[1, 2], min_new_tokens=3), EVERY, set()),
        (GenerationConfig(forbidden=(0, 7)), EVERY, {0, 7}),
        (GenerationConfig(forced_first=6), a_text([3], [], 9), {0, 1, 2, 3, 4, 5, 7}),
        (GenerationConfig(forced_last=6), a_text([3], [1, 2], 3), {0, 1, 2, 3, 4, 5, 7}),
        (GenerationConfig(forced_first=5, forced_last=6), a_text([3], [1], 3), set()),
        (GenerationConfig(forced_first=5, forced_last=6), a_text([3], [], 1), {0, 1, 2, 3, 4, 5, 7}),
    ],
    ids=str,
)
def test_rules(rules: GenerationConfig, text: Text, banned: set[int]) -> None:
    values = torch.linspace(-2, -1, 8).unsqueeze(0)
    logits = constrain(values, [text], rules)[0]
    assert {i for i in range(8) if logits[i] == -math.inf} == banned
    kept = [i for i in range(8) if i not in banned]
    forced = forced_token(text, rules)
    assert logits[kept].tolist() == ([0.0] if forced is not None else values[0, kept].tolist())


@given(st.lists(st.integers(0, 3), max_size=7), st.integers(1, 4))
def test_a_token_is_banned_just_where_its_n_gram_would_occur_twice(past: list[int], n: int) -> None:
    """The oracle appends each token and counts n-grams; [3, 3] with n = 2 bans 3."""

    def twice(text: list[int]) -> bool:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        return grams[-1:] != [] and grams.count(grams[-1]) > 1

    cut = len(past) // 2
    text = a_text(past[:cut], past[cut:], 9)
    assert banned_tokens(text, GenerationConfig(no_repeat_ngram=n)) == {
        t for t in range(4) if twice([*past, t])
    }


def test_repetition_penalty_divides_or_multiplies_what_was_seen() -> None:
    values = torch.tensor([[-1.0, 2.0, -3.0, 4.0]])
    logits = constrain(
        values, [a_text([0, 1], [1], 5)], GenerationConfig(sampling=Sampling(repetition_penalty=2.0))
    )
    assert logits.tolist() == [[-2.0, 1.0, -3.0, 4.0]]
    assert values.tolist() == [[-1.0, 2.0, -3.0, 4.0]]


@given(st.lists(st.integers(0, 5), max_size=9), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_count_the_text_and_not_the_prompt(ids: list[int], each: float, once: float) -> None:
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    values = torch.linspace(-2, 3, 6, dtype=torch.float64).unsqueeze(0)
    sampling = Sampling(frequency_penalty=each, presence_penalty=once)
    logits = constrain(values, [a_text([0, 1, 1], ids, 20)], GenerationConfig(sampling=sampling))
    counts = torch.tensor([ids.count(token) for token in range(6)]).double()
    torch.testing.assert_close(logits[0], values[0] - counts * each - (counts > 0).double() * once)


def test_bias_is_added_row_by_row_and_leaves_the_logits_as_they_were() -> None:
    values = torch.zeros(2, 6)
    texts = [a_text([0], [], 9), a_text([1], [2], 9)]
    logits = constrain(values, texts, GenerationConfig(bias={2: 1.5, 5: -100.0}))
    assert logits.tolist() == [[0, 0, 1.5, 0, 0, -100]] * 2
    assert not values.any()
