"""ROUGE-L against the plain table and rouge_score, and near-duplicates against a comparison with every text."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.instruct import Neighbours, lcs_length, rouge_l, words

FEW = st.lists(st.sampled_from("abcde"), max_size=14)


def table(a: list[str], b: list[str]) -> int:
    """Returns the length of the longest common subsequence by the textbook's quadratic table."""
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


@given(FEW, FEW)
def test_the_longest_common_subsequence_is_that_of_the_table(a: list[str], b: list[str]) -> None:
    assert lcs_length(a, b) == table(a, b)
    assert rouge_l(a, b) == (2 * table(a, b) / (len(a) + len(b)) if a and b else 0.0)


@example([["a"] * 6], ["a"] * 6, 0.7)
@given(st.lists(FEW, max_size=12), FEW, st.sampled_from([0.3, 0.7, 0.95]))
def test_the_bound_skips_nothing_that_counts(texts: list[list[str]], query: list[str], limit: float) -> None:
    pool = Neighbours(limit)
    for text in texts:
        pool.add(text)
    values = [rouge_l(query, text) for text in texts]
    best = max(values, default=0.0)
    assert pool.nearest(query) == ((values.index(best), best) if best > limit else None)


def test_most_comparisons_are_skipped() -> None:
    draw = random.Random(0)
    pool = Neighbours(0.7)
    for _ in range(400):
        text = [f"w{draw.randrange(300)}" for _ in range(12)] + ["the", "a", "of"]
        pool.nearest(text)
        pool.add(text)
    assert pool.compared < 0.02 * 400 * 399 / 2


@pytest.mark.slow
@given(st.text(st.characters(max_codepoint=126)), st.text(st.characters(max_codepoint=126)))
def test_of_ascii_it_is_that_of_rouge_score(a: str, b: str) -> None:
    from rouge_score import rouge_scorer

    a, b = a.replace("_", " "), b.replace("_", " ")
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=False)
    assert words(a) == scorer._tokenizer.tokenize(a)
    assert rouge_l(words(a), words(b)) == pytest.approx(scorer.score(a, b)["rougeL"].fmeasure, abs=1e-12)
