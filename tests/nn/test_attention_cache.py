"""A layer with a cache: it continues where it stopped, and keys are rotated by the length of their row."""

import pytest
import torch

from headway.nn import GlobalAttention
from headway.patterns import Causal, Global, Pattern, Window
from headway.tokens import Tokens
from tests.cache.layers import cache_of, continued
from tests.nn.test_attention import CASES, HEADS, LENGTH, MOVING, WIDTH, X, in_chunks, layer_of


@pytest.mark.parametrize("case", ["plain", "window", "normed", "biased", "values of another width"])
@pytest.mark.parametrize("edges", [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5], [3, 4, 9]])
def test_a_cache_continues_by_itself(case: str, edges: list[int]) -> None:
    layer = layer_of(2, **CASES[case])
    actual = in_chunks(layer, X, edges)
    assert torch.allclose(actual, layer(X), rtol=0, atol=1e-12)


@torch.no_grad()
def test_without_a_cache_nothing_is_remembered() -> None:
    layer = layer_of()
    cache, alone = cache_of(layer, 2), layer(X[:, 4:])
    continued(layer, X[:, :4], cache)
    assert torch.equal(layer(X[:, 4:]), alone)
    assert not torch.equal(continued(layer, X[:, 4:], cache), alone)


@pytest.mark.parametrize("pattern", [Causal(), Window.last(4)], ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_frequencies_that_move_with_the_length_decode_alike(name: str, pattern: Pattern) -> None:
    """The cache stores keys unrotated: after t tokens a query gets what a full forward over t tokens gives it."""
    layer = layer_of(2, positions=MOVING[name], pattern=pattern)
    stepped = in_chunks(layer, X, list(range(1, LENGTH)))
    for t in range(1, LENGTH + 1):
        assert torch.allclose(stepped[:, t - 1], layer(X[:, :t])[:, -1], rtol=0, atol=1e-12), t
    assert not torch.allclose(layer(X)[:, 1], layer(X[:, :2])[:, 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MOVING)
def test_frequencies_are_those_of_each_row_and_each_document(name: str) -> None:
    layer = layer_of(2, positions=MOVING[name])
    ragged = layer(X, tokens=Tokens.from_lengths([LENGTH, 5], side="left"))
    assert torch.allclose(ragged[0], layer(X[:1])[0], rtol=0, atol=1e-12)
    assert torch.allclose(ragged[1, -5:], layer(X[1:, -5:])[0], rtol=0, atol=1e-12)
    packed = layer(X[:1], tokens=Tokens.packed([8, 3]))
    assert torch.allclose(packed[0, :8], layer(X[:1, :8])[0], rtol=0, atol=1e-12)
    assert torch.allclose(packed[0, 8:], layer(X[:1, 8:])[0], rtol=0, atol=1e-12)


def test_a_ragged_cache_turns_keys_by_each_row_s_length() -> None:
    layer = layer_of(2, positions=MOVING["dynamic"])
    cache = cache_of(layer, 2)
    with torch.no_grad():
        continued(layer, X[:, :8], cache, Tokens.from_lengths([8, 3]))
        actual = continued(layer, X[:, 8:9], cache)
        for b, n in enumerate((8, 3)):
            alone = torch.cat([X[b : b + 1, :n], X[b : b + 1, 8:9]], 1)
            assert torch.allclose(actual[b, 0], layer(alone)[0, -1], rtol=0, atol=1e-12)


def test_global_queries_are_rotated_by_the_length_of_their_row() -> None:
    """If frequencies depend on the length, those of a global query belong to its whole row (or document), and not to
    the global tokens alone."""
    torch.manual_seed(2)
    layer = GlobalAttention(
        WIDTH, HEADS, head_dim=6, pattern=Window.around(2) | Global(), positions=MOVING["dynamic"]
    ).double()
    tokens = Tokens.from_lengths([LENGTH, 8]).with_global([[0, 3], [5]])
    actual = layer(X, tokens=tokens)
    for row, length, marks in ((0, LENGTH, (0, 3)), (1, 8, (5,))):
        x, index = X[row : row + 1, :length], torch.arange(length)
        q, k, v = layer.projected(x, of_global=True)
        q, k = (MOVING["dynamic"].rotate(t, index, length) for t in (q, k))
        out = ((q @ k.mT) * 6**-0.5).softmax(-1) @ v
        expected = layer.o_proj(out.transpose(1, 2).flatten(2))
        for slot in marks:
            assert torch.allclose(actual[row, slot], expected[0, slot], rtol=0, atol=1e-12)
