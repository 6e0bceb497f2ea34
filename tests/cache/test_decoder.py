"""The caches of all layers, moved together."""

import re

import pytest
import torch

from headway.cache import Cache, DecoderCache, GrowingCache
from headway.errors import CacheError
from headway.patterns import Causal, Sink, Window
from headway.tokens import Tokens

PATTERNS = [Causal(), Window.last(4), Window.last(3) | (Causal() & Sink(1))]


def make(batch: int = 2, slack: int = 0) -> DecoderCache:
    return DecoderCache.of(PATTERNS, batch=batch, kv_heads=1, head_dim=2, slack=slack)


def forward(cache: DecoderCache, tokens: Tokens, layers: int = 3) -> None:
    for layer in cache.layers[:layers]:
        x = torch.randn(cache.batch, 1, tokens.count, 2)
        layer.update(x, x, tokens)


def test_each_layer_has_the_cache_of_its_pattern() -> None:
    cache = make()
    assert [type(layer).__name__ for layer in cache.layers] == ["GrowingCache", "RingCache", "RingCache"]
    assert [layer.bound for layer in cache.layers] == [None, 4, 4]
    assert (len(cache), cache[1], cache.bound) == (3, cache.layers[1], None)
    assert DecoderCache(cache.layers[1:]).bound == 8


def test_equal_rows_are_numbered_by_one_start() -> None:
    cache = make()
    for count in (5, 1, 1, 7):
        tokens = cache.next_tokens(count)
        assert tokens.start == cache.lengths[0]
        assert tokens.index.shape == (1, count)
        forward(cache, tokens)
    assert cache.length.tolist() == [14, 14]
    assert cache.slots == 14 + 4 + 4
    assert cache.nbytes == sum(layer.nbytes for layer in cache.layers)


@pytest.mark.parametrize(
    ("side", "want"), [("right", [[0, 1, 2], [0, -1, -1]]), ("left", [[0, 1, 2], [-1, -1, 0]])]
)
def test_ragged_rows_are_numbered_each_on_its_own(side: str, want: list[list[int]]) -> None:
    cache = make()
    tokens = cache.next_tokens(3, lengths=torch.tensor([3, 1]), side=side)
    assert tokens.index.tolist() == want
    assert tokens.start is None
    forward(cache, tokens)
    assert cache.next_tokens(2).index.tolist() == [[3, 4], [1, 2]]
    assert cache.next_tokens(2, [0, 2]).index.tolist() == [[-1, -1], [1, 2]]
    forward(cache, cache.next_tokens(2, [0, 2]))
    assert cache.next_tokens(1).start == 3


def test_full_lengths_are_as_good_as_none() -> None:
    assert make().next_tokens(4, [4, 4]).start == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"count": 2, "lengths": [3, 1]}, "lengths must be 2 numbers in 0..2, one per row, got [3, 1]"),
        ({"count": 2, "lengths": [1]}, "lengths must be 2 numbers in 0..2"),
        ({"count": -1}, "a chunk has 0 slots or more, got -1"),
        ({"count": 1, "side": "top"}, 'side is "left" or "right", got \'top\''),
    ],
)
def test_chunks_that_cannot_be_are_refused(call: dict[str, object], message: str) -> None:
    with pytest.raises(CacheError, match=re.escape(message)):
        make().next_tokens(**call)


def test_a_trim_that_one_layer_refuses_changes_no_layer() -> None:
    cache = make(slack=1)
    forward(cache, cache.next_tokens(20))
    with pytest.raises(CacheError, match="can forget at most 2 of them"):
        cache.trim(3)
    assert cache.lengths == (20, 20)
    cache.trim([2, 0])
    assert cache.lengths == (18, 20)
    forward(cache, cache.next_tokens(1))
    assert cache.length.tolist() == [19, 21]


def test_a_pass_that_was_broken_off_is_noticed() -> None:
    cache = make()
    forward(cache, cache.next_tokens(2))
    before = cache.fork()
    forward(cache, cache.next_tokens(1), layers=2)
    for use in (lambda: cache.next_tokens(1), lambda: cache.trim(1), lambda: cache.length):
        with pytest.raises(CacheError, match=r"layer 0 has seen \[3, 3\] tokens per row, layer 2 \[2, 2\]"):
            use()
    forward(before, before.next_tokens(1))
    assert before.lengths == (3, 3)


def test_forks_and_reordering_reach_every_layer() -> None:
    cache = make()
    forward(cache, cache.next_tokens(3, [3, 2]))
    copied = cache.fork()
    cache.reorder([1, 1, 0])
    assert [layer.lengths for layer in cache.layers] == [(2, 2, 3)] * 3
    assert copied.lengths == (3, 2)
    forward(cache, cache.next_tokens(1))
    assert (cache.batch, copied.lengths) == (3, (3, 2))


def test_room_can_be_made_beforehand() -> None:
    cache = make()
    cache.reserve(100)
    assert [layer.capacity for layer in cache.layers] == [100, 4, 4]


def test_a_decoder_has_layers_that_agree() -> None:
    with pytest.raises(CacheError, match="one layer or more"):
        DecoderCache([])
    first: Cache = GrowingCache(batch=1, kv_heads=1, head_dim=2)
    first.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), Tokens.range(1))
    with pytest.raises(CacheError, match="layer 0 has seen"):
        DecoderCache([first, GrowingCache(batch=1, kv_heads=1, head_dim=2)])
