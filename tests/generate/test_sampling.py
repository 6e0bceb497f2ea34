"""Sampling: identities, exact counts of the kept tokens, Hugging Face's processors as the oracle, and the noise."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import ConfigError
from headway.generate import Sampling, uniform
from headway.generate.sampling import draw, min_p, penalize_repetition, top_k, top_p

SHAPES = st.tuples(st.integers(1, 3), st.integers(2, 40), st.integers(0, 2**31))


def some(shape: tuple[int, int, int], ties: bool = False) -> Tensor:
    rows, vocab, seed = shape
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if ties else logits


def kept(logits: Tensor) -> Tensor:
    return logits > float("-inf")


@given(SHAPES, st.booleans(), st.floats(0, 1, exclude_max=True))
def test_top_1_is_greedy(shape: tuple[int, int, int], ties: bool, noise: float) -> None:
    logits = some(shape, ties)
    greedy = Sampling().choose(logits, [noise] * shape[0])
    assert torch.equal(greedy, logits.argmax(-1))
    for sampling in (
        Sampling(temperature=1.3, top_k=1),
        Sampling(temperature=1.0, top_p=1e-9, top_k=1),
        Sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1),
    ):
        assert torch.equal(sampling.choose(logits, [noise] * shape[0]), greedy)
    if not ties:
        for sampling in (Sampling(temperature=1.0, top_p=1e-9), Sampling(temperature=1.0, min_p=1.0)):
            assert torch.equal(sampling.choose(logits, [noise] * shape[0]), greedy)


@given(SHAPES, st.booleans())
def test_what_is_no_filter(shape: tuple[int, int, int], ties: bool) -> None:
    logits = some(shape, ties)
    every = torch.ones_like(logits, dtype=torch.bool)
    for same in (top_k(logits, shape[1]), top_k(logits, 10**6), penalize_repetition(logits, 1.0, every)):
        assert torch.equal(same, logits)
    free = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert torch.equal(free.filter(logits), logits)


@given(SHAPES, st.booleans(), st.integers(1, 50))
def test_top_k_keeps_exactly_k_of_the_largest(shape: tuple[int, int, int], ties: bool, k: int) -> None:
    logits = some(shape, ties)
    keep = kept(top_k(logits, k))
    assert keep.sum(-1).tolist() == [min(k, shape[1])] * shape[0]
    for row, kept_row in zip(logits, keep, strict=True):
        if not kept_row.all():
            assert row[kept_row].min() >= row[~kept_row].max()


@given(SHAPES, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_reach_p(shape: tuple[int, int, int], p: float) -> None:
    logits = some(shape)
    keep = kept(top_p(logits, p))
    for probabilities, kept_row in zip(logits.double().softmax(-1), keep, strict=True):
        inside = probabilities[kept_row]
        assert inside.sum() >= p - 1e-12
        assert inside.sum() - inside.min() < p + 1e-12
        if not kept_row.all():
            assert inside.min() >= probabilities[~kept_row].max()


@pytest.mark.parametrize(("p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4)])
def test_top_p_that_is_met_exactly_is_reached(p: float, count: int) -> None:
    """Four equal tokens have probability 1/4 each, to the bit."""
    assert int(kept(top_p(torch.zeros(1, 4), p)).sum()) == count


@given(SHAPES, st.floats(0.01, 0.99))
def test_min_p_by_its_definition(shape: tuple[int, int, int], p: float) -> None:
    logits = some(shape)
    ratio = logits.double().softmax(-1) / logits.double().softmax(-1).amax(-1, keepdim=True)
    clear = (ratio - p).abs() > 1e-5
    assert torch.equal(kept(min_p(logits, p))[clear], (ratio >= p)[clear])


@given(
    SHAPES,
    st.floats(0.3, 2.0),
    st.integers(1, 10),
    st.floats(0.1, 0.95),
    st.floats(0.01, 0.5),
    st.floats(0.8, 1.5),
)
def test_the_processors_of_transformers_agree(
    shape: tuple[int, int, int], temperature: float, k: int, p: float, m: float, penalty: float
) -> None:
    from transformers.generation import logits_process as theirs

    logits = some(shape)
    ids = torch.randint(0, shape[1], (shape[0], 5), generator=torch.Generator().manual_seed(shape[2]))
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    expected = logits
    for processor in (
        theirs.RepetitionPenaltyLogitsProcessor(penalty),
        theirs.TemperatureLogitsWarper(temperature),
        theirs.TopKLogitsWarper(k),
        theirs.TopPLogitsWarper(p),
        theirs.MinPLogitsWarper(m),
    ):
        expected = processor(ids, expected)
    sampling = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=m)
    logits = penalize_repetition(logits, penalty, seen)
    actual = sampling.filter(logits)
    # a token whose cumulative probability equals p up to rounding may fall on either side
    differ = (actual == float("-inf")) != (expected == float("-inf"))
    assert differ.sum(-1).max() == 0 or _on_the_edge(logits, differ, sampling)
    both = (actual > float("-inf")) & (expected > float("-inf"))
    assert torch.allclose(actual[both], expected[both], rtol=1e-6, atol=0)


def _on_the_edge(logits: Tensor, differ: Tensor, sampling: Sampling) -> bool:
    logits = replace(sampling, top_p=1.0, min_p=0.0).filter(logits)
    ordered = logits.double().softmax(-1).sort(dim=-1, descending=True).values.cumsum(-1)
    return bool(((ordered - sampling.top_p).abs().amin(-1) < 1e-5)[differ.any(-1)].all())


def test_a_draw_follows_the_probabilities() -> None:
    """A chi-square test of 20000 keyed draws; the bound is its mean + 5 deviations."""
    logits = torch.tensor([[2.0, 0.0, float("-inf"), 1.0, -1.0]])
    n = 20000
    drawn = draw(logits.expand(n, -1), [uniform(7, 3, step) for step in range(n)])
    counts = Counter(drawn.tolist())
    assert counts[2] == 0
    expected = (logits.double().softmax(-1)[0] * n).tolist()
    statistic = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected) if e)
    assert statistic < 3 + 5 * 6**0.5


def test_extremes_of_the_noise_draw_what_can_be_drawn() -> None:
    inf = float("inf")
    logits = torch.tensor([[-inf, 1.0, -inf, 2.0, -inf]]).expand(3, -1)
    assert draw(logits, [0.0, 1 - 2**-53, 0.5]).tolist() == [1, 3, 3]
    tiny = torch.tensor([[0.0, -800.0, -inf]])  # a probability that underflows
    assert draw(tiny, [1 - 2**-53]).tolist() == [0]


def test_noise_is_a_function_of_its_key() -> None:
    numbers = {uniform(s, r, t) for s in range(10) for r in range(10) for t in range(10)}
    assert len(numbers) == 1000
    assert all(0 <= u < 1 for u in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 5 / (12 * 1000) ** 0.5
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(2, 1, 3)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\), or 1e-10 or more, got -0.1"),
        ({"temperature": 1e-11}, "temperature must be .* got 1e-11"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"top_k": float("inf")}, "top_k must be .*, got inf"),
        ({"top_k": -1}, r"top_k must be 0 \(no filter\) or a whole number above 0, got -1"),
        ({"top_k": 1.5}, "top_k must be .* got 1.5"),
        ({"top_p": 0.0}, "top_p must be more than 0 and at most 1 .* got 0.0"),
        ({"top_p": 1.1}, "top_p must be .* got 1.1"),
        ({"min_p": -0.1}, r"min_p must be 0 to 1 \(0 is no filter\), got -0.1"),
        ({"min_p": 1.1}, "min_p must be .* got 1.1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be 1e-10 or more \(1 is none\), got 0.0"),
    ],
)
def test_values_out_of_range(given: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Sampling(**given)  # type: ignore[arg-type]
