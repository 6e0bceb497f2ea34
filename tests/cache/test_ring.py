"""What is particular to a ring: its bound, its slack, when it copies, and when its keys are in order."""

import pytest
import torch
from torch import Tensor

from headway.attention import KeyValues
from headway.cache import CacheSpec, KVCache, Ring
from headway.errors import CacheError
from headway.patterns import Retention
from headway.tokens import Tokens

REACH = 4


def ring(
    batch: int = 1, reach: int = REACH, sinks: int = 0, globals: bool = False, slack: int = 0
) -> KVCache:
    spec = CacheSpec(batch=batch, kv_heads=1, head_dim=2)
    return KVCache.of(Ring(Retention(reach, sinks, globals), slack), spec)


def numbers(begin: int, count: int, batch: int = 1) -> Tensor:
    """Keys that say their index: [B, 1, count, 2]."""
    return torch.arange(begin, begin + count, dtype=torch.float32)[None, None, :, None].expand(
        batch, 1, -1, 2
    )


def give(cache: KVCache, *counts: int) -> KeyValues:
    keys = None
    for count in counts:
        begin = cache.lengths[0]
        x = numbers(begin, count, cache.batch)
        keys = cache.update(x, -x, Tokens.range(count, start=begin))
    assert keys is not None
    return keys


def shares_memory(keys: KeyValues, cache: KVCache) -> bool:
    return keys.k.untyped_storage().data_ptr() == cache.tensors[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("sinks", [0, 2])
def test_it_never_holds_or_allocates_more_than_its_bound(slack: int, sinks: int) -> None:
    cache = ring(slack=slack, sinks=sinks)
    assert cache.bound == sinks + REACH + 1 + slack
    for count in (1, 1, 3, 1, 20, 1, 2, 1, 1, 50):
        give(cache, count)
        assert cache.slots <= cache.capacity <= cache.bound
    assert cache.slots == cache.capacity == cache.bound
    assert cache.nbytes == cache.bound * 2 * (2 * 4)


def test_a_far_reach_costs_nothing_before_rows_have_come_that_far() -> None:
    cache = ring(reach=10**6)
    give(cache, 5, 1)
    assert cache.capacity == 10
    cache.reserve(64)
    assert cache.capacity == 64
    small = ring()
    small.reserve(10**6)
    assert small.capacity == small.bound


@pytest.mark.parametrize("slack", [0, 2])
def test_a_chunk_up_to_slack_plus_one_is_attended_over_in_place(slack: int) -> None:
    cache = ring(slack=slack)
    give(cache, 30)
    for count in range(1, slack + 2):
        keys = give(cache, count)
        assert shares_memory(keys, cache)
        assert keys.tokens.count == cache.bound
    assert not shares_memory(give(cache, slack + 2), cache)


def test_any_chunk_is_in_place_and_in_order_until_the_ring_is_full() -> None:
    cache = ring(sinks=2, slack=3)
    for count in (4, 5, 1):
        keys = give(cache, count)
        assert shares_memory(keys, cache)
        assert keys.tokens.start == 0
        assert keys.tokens.count == cache.lengths[0]
    assert cache.lengths == (cache.bound,)
    assert give(cache, 1).tokens.start is None


def test_long_chunks_are_in_order_without_sinks_and_bring_only_what_they_need() -> None:
    cache = ring()
    first = give(cache, 20)
    assert first.tokens.start == 0
    keys = give(cache, 7)
    assert keys.tokens.start == 20 - REACH
    assert keys.tokens.count == REACH + 7
    assert keys.k[0, 0, :, 0].tolist() == list(range(16, 27))
    assert keys.v[0, 0, :, 0].tolist() == [-i for i in range(16, 27)]


def test_long_chunks_with_sinks_bring_the_sinks_once() -> None:
    cache = ring(sinks=2)
    give(cache, 5)
    assert give(cache, 9).tokens.start == 0
    keys = give(cache, 9)
    assert keys.tokens.start is None
    assert keys.k[0, 0, :, 0].tolist() == [0, 1, *range(10, 23)]
    assert keys.tokens.index[0].tolist() == [0, 1, *range(10, 23)]


def test_a_global_token_is_pinned_and_not_in_the_ring_too() -> None:
    cache = ring(globals=True, sinks=1, slack=1)
    x = numbers(0, 3)
    cache.update(x, x, Tokens.range(3).with_global([0, 2]))
    give(cache, *[1] * 30)
    held = sorted(i for i in cache.table.tokens.index[0].tolist() if i >= 0)
    assert held == [0, 2, *range(27, 33)]
    assert cache.bound == 1 + (REACH + 2) + 1


def test_global_tokens_of_rows_are_their_own() -> None:
    cache = ring(batch=2, globals=True)
    x = numbers(0, 4, 2)
    cache.update(x, x, Tokens.range(4).with_global([[0, 1], [3]]))
    give(cache, *[1] * 20)
    held = [{i for i in row if 0 <= i < 10} for row in cache.table.tokens.index.tolist()]
    assert held == [{0, 1}, {3}]


def test_marks_do_not_pin_where_the_pattern_has_no_global_keys() -> None:
    cache = ring()
    x = numbers(0, 4)
    keys = cache.update(x, x, Tokens.range(4).with_global([0]))
    assert keys.tokens.globals[0].tolist() == [True, False, False, False]
    give(cache, *[1] * 20)
    assert cache.slots == cache.bound
    assert not cache.table.tokens.is_global.any()


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_a_wrapped_ring_takes_back_its_slack_and_one_more_but_no_further(slack: int) -> None:
    cache = ring(slack=slack)
    give(cache, *[1] * 20)
    with pytest.raises(
        CacheError,
        match=rf"row 0 has seen 20 tokens and can forget at most {slack + 1} of them \(or all of them\), "
        rf"not {slack + 2}: this ring \(reach 4, slack {slack}\) has overwritten .* slack={slack + 2}",
    ):
        cache.trim(slack + 2)
    assert cache.lengths == (20,)
    cache.trim(slack + 1)
    keys = give(cache, 1)
    length = cache.lengths[0]
    held = keys.tokens.index[0].tolist()
    assert set(range(length - 1 - REACH, length)) <= set(held)
    assert max(held) == length - 1


def test_slack_spent_is_spent_until_the_ring_has_gone_on() -> None:
    cache = ring(slack=2)
    give(cache, *[1] * 20)
    cache.trim(2)
    cache.trim(1)
    with pytest.raises(CacheError, match="can forget at most 0 of them"):
        cache.trim(1)
    give(cache, 1)
    cache.trim(1)
    with pytest.raises(CacheError, match="can forget at most 0 of them"):
        cache.trim(1)
    give(cache, 4)
    cache.trim(3)


def test_a_ring_that_is_not_full_takes_back_anything() -> None:
    cache = ring(sinks=1, slack=1)
    give(cache, 7)
    cache.trim(5)
    assert cache.lengths == (2,)
    assert give(cache, 2).k[0, 0, :, 0].tolist() == [0, 1, 2, 3]


def test_a_ring_can_be_cut_back_to_its_sinks_and_is_as_new() -> None:
    cache = ring(sinks=2)
    give(cache, 40)
    with pytest.raises(CacheError, match=r"\(or all but the first 2\)"):
        cache.trim(37)
    cache.trim(39)
    keys = give(cache, 5)
    assert keys.tokens.start == 0
    assert keys.k[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    cache.trim(3)
    assert cache.lengths == (3,)


def test_a_copy_goes_back_further_than_slack() -> None:
    cache = ring()
    give(cache, 20)
    draft = cache.fork()
    give(draft, *[1] * 9)
    assert (cache.lengths, draft.lengths) == ((20,), (29,))
    assert give(cache, 1).k[0, 0].amax() == 20


@pytest.mark.parametrize("name", ["reach", "sinks", "slack"])
def test_negative_sizes_are_refused(name: str) -> None:
    sizes = {"reach": 1, "sinks": 0, "slack": 0, name: -1}
    with pytest.raises(CacheError, match=rf"count tokens, got .*{name}=-1"):
        ring(**sizes)
