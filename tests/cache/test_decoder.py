"""The caches of all layers, moved together."""

import re

import pytest
import torch

from headway.cache import CacheSpec, DecoderCache, make_cache
from headway.errors import CacheError
from headway.patterns import Causal, Sink, Window
from headway.tokens import Tokens

PATTERNS = [Causal(), Window.last(4), Window.last(3) | (Causal() & Sink(1))]


def make(batch: int = 2, slack: int = 0) -> DecoderCache:
    return DecoderCache.of(PATTERNS, CacheSpec(batch=batch, kv_heads=1, head_dim=2), slack=slack)


def forward(cache: DecoderCache, tokens: Tokens, layers: int = 3) -> None:
    for layer in cache.layers[:layers]:
        x = torch.randn(cache.batch, 1, tokens.count, 2)
        layer.update(x, x, tokens)


def test_each_layer_has_the_cache_of_its_pattern() -> None:
    cache = make()
    assert [layer.table.policy.name for layer in cache.layers] == ["growing", "ring", "ring"]
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
    assert [(layer.table.tokens.index.amax(1) + 1).tolist() for layer in cache.layers] == [[18, 20]] * 3
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
    spec = CacheSpec(batch=1, kv_heads=1, head_dim=2)
    first = make_cache(Causal(), spec)
    first.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), Tokens.range(1))
    with pytest.raises(CacheError, match="layer 0 has seen"):
        DecoderCache([first, make_cache(Causal(), spec)])


def test_layers_of_equal_retention_share_one_table() -> None:
    """Whatever their patterns: what they retain, and the slack, decide."""
    patterns = [Causal(), Window.last(4), Window.last(2, step=3), Causal(), Window.last(5)]
    spec = CacheSpec(batch=1, kv_heads=1, head_dim=2)
    cache = DecoderCache.of(patterns, spec)
    tables = [layer.table for layer in cache.layers]
    assert [tables.index(table) for table in tables] == [0, 1, 1, 0, 4]
    assert len({id(layer.table) for layer in DecoderCache.of(patterns, spec, kind="growing").layers}) == 1
    copied = [layer.table for layer in cache.fork().layers]
    assert [copied.index(table) for table in copied] == [0, 1, 1, 0, 4]
    assert not set(map(id, copied)) & set(map(id, tables))


def test_layers_of_one_decoder_store_what_each_is_given() -> None:
    """In the same slots; a layer that is given equal tokens, but not the same object, follows too."""
    cache = DecoderCache.of([Window.last(3)] * 2, CacheSpec(batch=1, kv_heads=1, head_dim=1))
    for count in (2, 1, 5, 1, 1):
        begin = cache.lengths[0]
        x = torch.arange(begin, begin + count, dtype=torch.float32).view(1, 1, -1, 1)
        one, other = (
            layer.update(sign * x, x, layer.next_tokens(count))
            for layer, sign in zip(cache.layers, (1, -1), strict=True)
        )
        assert torch.equal(one.k, -other.k)
        assert one.k[0, 0, :, 0].tolist() == one.tokens.index[0].tolist()


def test_one_layer_of_several_is_not_moved_alone() -> None:
    cache = DecoderCache.of([Causal()] * 3, CacheSpec(batch=1, kv_heads=1, head_dim=2))
    forward(cache, cache.next_tokens(2))
    for some in (cache[1], DecoderCache(cache.layers[1:])):
        for move in (lambda c=some: c.trim(1), lambda c=some: c.reorder([0]), some.fork):
            with pytest.raises(
                CacheError, match=r"\d of 3 layers that share their lengths cannot be .* alone"
            ):
                move()
    assert cache.fork().lengths == (2,)


def test_a_layer_that_is_given_other_tokens_than_the_first_is_refused() -> None:
    cache = DecoderCache.of([Causal()] * 2, CacheSpec(batch=1, kv_heads=1, head_dim=2))
    x = torch.zeros(1, 1, 2, 2)
    cache[0].update(x, x, Tokens.range(2))
    for other in (Tokens.range(2, start=2), Tokens.range(2).with_global([0])):
        with pytest.raises(CacheError, match=r"a layer before has seen \[2\] tokens per row, this one \[0\]"):
            cache[1].update(x, x, other)
    cache[1].update(x, x, Tokens.range(2))
    assert cache.lengths == (2,)


def test_rows_that_go_on_alike_are_placed_without_reading_a_tensor() -> None:
    """So nothing waits for a device: tensors of "meta" have no values that could be read."""
    spec = CacheSpec(batch=2, kv_heads=1, head_dim=2, device="meta")
    cache = DecoderCache.of(PATTERNS, spec)
    for count in (2, 1, 9, 1, 1):
        tokens = cache.next_tokens(count)
        x = torch.empty(2, 1, count, 2, device="meta")
        shapes = [layer.update(x, x, tokens).k.shape[2] for layer in cache.layers]
    assert (cache.lengths, shapes) == ((14, 14), [14, 4, 4])
