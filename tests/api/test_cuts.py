"""Cuts of attention (pairs that queries cannot see), what kernels compute for one query, and where heads look."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.api import Cut, LanguageModel
from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError, DataError, HeadwayError
from headway.models import ModelSpec
from headway.models.attention_maps import shares_of
from headway.nn.cuts import Outside, patterns_without
from headway.nn.record import Record
from headway.patterns import Causal, PerHead, Window, classify
from headway.tokens import Tokens
from tests.api.maps import IDS, SIZE, SPECS, loaded, maps_of
from tests.generate.conftest import small

CAUSAL = [name for name, spec in SPECS.items() if spec.causal]
CUTTABLE = [name for name in CAUSAL if "linear attention" not in name]


@pytest.mark.parametrize("name", SPECS)
def test_what_kernels_make_of_a_query_is_the_sum_of_weights_times_values(name: str) -> None:
    """In float64, up to the rounding of sums of about twenty terms."""
    for attention_map in maps_of(loaded(SPECS[name])).values():
        for query in (0, 4, -1):
            mean = torch.einsum("hs,hse->he", attention_map.row(query), attention_map.values(query))
            assert torch.allclose(attention_map.result(query), mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CAUSAL)
def test_without_cuts_it_is_what_generation_tells(name: str) -> None:
    lm = loaded(SPECS[name])
    log_probs = lm.next_log_probs(IDS)
    assert torch.allclose(log_probs, lm.model(torch.tensor([IDS]))[0, -1].log_softmax(-1), atol=1e-12)
    assert float(log_probs.exp().sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", CUTTABLE)
def test_a_head_that_is_cut_adds_nothing(name: str) -> None:
    """The result is as if the head's columns of the output projection were 0."""
    lm = loaded(SPECS[name])
    cut = lm.next_log_probs(IDS, cuts=[Cut(layer=1, head=2)])
    size = lm.spec.head_dim
    with torch.no_grad():
        lm.model.model.blocks[1].self_attn.o_proj.weight[:, 2 * size : 3 * size] = 0
    assert torch.allclose(cut, lm.next_log_probs(IDS), atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CUTTABLE if "relative" not in name])
def test_a_span_that_is_cut_was_never_there(name: str) -> None:
    """The result is as if the tokens of the span were missing and the others kept their positions."""
    lm = loaded(SPECS[name])
    cut = lm.next_log_probs(IDS, cuts=[Cut(keys=(4, 9))])
    kept = [i for i in range(len(IDS)) if not 4 <= i < 9]
    tokens = Tokens(torch.tensor([kept]))
    expected = lm.model(torch.tensor([[IDS[i] for i in kept]]), tokens=tokens)[0, -1].log_softmax(-1)
    assert torch.allclose(cut, expected, atol=1e-11)
    assert not torch.allclose(cut, lm.next_log_probs(IDS), atol=1e-6)


def test_an_edge_that_is_cut_leaves_its_weight_to_the_others() -> None:
    lm = loaded(SPECS["window with sinks, full"])
    stack = lm.model.model
    layers = [block.self_attn for block in stack.blocks]
    whole = lm.attention(IDS, layers=0)[0]
    cut = Cut(layer=0, head=1, queries=(9, 10), keys=(8, 9))
    record = Record([layers[0]], patterns=patterns_without(layers, [cut]))
    with torch.inference_mode():
        stack(torch.tensor([IDS]), Tokens.range(len(IDS)), record=record)
    actual = replace(whole, attended=record.attended[layers[0]])
    expected = whole.weights().clone()
    expected[1, 9, 8] = 0
    expected[1, 9] /= expected[1, 9].sum()
    assert torch.allclose(actual.weights(), expected, atol=1e-12)


def test_cuts_add_up_and_nothing_of_the_model_changes() -> None:
    lm = loaded(SPECS["a pattern per head"])
    before = lm.next_log_probs(IDS)
    both = lm.next_log_probs(IDS, cuts=[Cut(0, 1), Cut(0, 2)])
    assert not torch.allclose(both, lm.next_log_probs(IDS, cuts=[Cut(0, 1)]), atol=1e-6)
    assert torch.equal(lm.next_log_probs(IDS), before)
    layers = [block.self_attn for block in lm.model.model.blocks]
    (pattern,) = patterns_without(layers, [Cut(0, 1), Cut(0, keys=(2, 3))]).values()
    assert isinstance(pattern, PerHead)
    assert len(pattern.heads) == 4


def test_the_kernels_of_long_texts_cut_the_same() -> None:
    """1,000 tokens in float32: kernels that do not know the cut pattern leave it to others; a cut head has its own."""
    model = small((Window.last(100), Causal()), context=2048)
    lm, ids = LanguageModel(model), [n * 7 % 300 for n in range(1000)]
    for cut in (Cut(1, 2), Cut(keys=(900, 950)), Cut(1, 0, (999, 1000), (5, 40))):
        actual = lm.next_log_probs(ids, cuts=[cut])
        float64_lm = LanguageModel(small((Window.last(100), Causal()), context=2048).double())
        assert torch.allclose(actual.double(), float64_lm.next_log_probs(ids, cuts=[cut]), atol=2e-4)


SPANS = st.none() | st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda at: (at[0], at[0] + at[1]))


@given(SPANS, SPANS, st.integers(1, 9), st.integers(1, 9))
def test_tiles_are_judged_as_their_pairs_are(queries: Any, keys: Any, q_tile: int, k_tile: int) -> None:
    """A tile is possible if any of its pairs is allowed, and perhaps also if none is; it is certain only if all are."""
    tokens, pattern = Tokens.range(47), Outside(queries, keys)
    allowed = pattern.allows(tokens, tokens)[0]
    possible, certain = (t[0] for t in classify(pattern, tokens, tokens, q_tile, k_tile))
    for i, rows in enumerate(allowed.split(q_tile)):
        for j, tile in enumerate(rows.split(k_tile, 1)):
            assert bool(possible[i, j]) or not tile.any()
            assert not certain[i, j] or tile.all()


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (Cut(layer=2), "no layer 2 among 0..1"),
        (Cut(head=4), "no head 4 among 0..3"),
        (Cut(keys=(3, 3)), "first < end"),
        (Cut(queries=(-1, 3)), "first < end"),
    ],
)
def test_a_cut_of_what_is_not_there_is_said(cut: Cut, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(SPECS["window with sinks, full"]).next_log_probs(IDS, cuts=[cut])


def test_linear_attention_has_no_pairs_to_cut() -> None:
    lm = loaded(ModelSpec.of("llama", **SIZE).with_mixer(LinearAttentionSpec("elu+1")))
    with pytest.raises(HeadwayError, match=r"Causal\(\)"):
        lm.next_log_probs(IDS, cuts=[Cut(keys=(1, 3))])
    with pytest.raises(DataError):
        lm.next_log_probs([])


def test_shares_of_rows_that_are_written_down() -> None:
    keys = ["a", "b", "c", "a", "b", "a"]
    weights = torch.zeros(6, 6)
    weights[5] = torch.tensor([0.05, 0.3, 0.0, 0.15, 0.4, 0.1])
    weights[2] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    (last, middle) = (shares_of(weights[[i]], [i], keys) for i in (5, 2))
    # "a" stood at 0 and 3; right after it stand the tokens 1 and 4
    assert last[:5] == pytest.approx((0.05, 0.1, 0.4, 0.7, 0.2))
    assert last.entropy == pytest.approx(-sum(w * math.log(w) for w in (0.05, 0.3, 0.15, 0.4, 0.1)))
    assert last.evenness == pytest.approx(last.entropy / math.log(5))
    assert (last.kind, middle.kind, middle.evenness) == ("induction", "previous", 1)
    even = shares_of(torch.full((1, 6), 1 / 6), [5], ["a", "b", "c", "d", "e", "f"])
    assert even.evenness == pytest.approx(1)
    assert even.kind == "even"
    both = shares_of(weights[[5, 2]], [5, 2], keys)
    assert both.first == pytest.approx(0.025)
    assert math.isnan(shares_of(torch.tensor([[1.5, -0.5]]), [1], ["a", "b"]).entropy)
