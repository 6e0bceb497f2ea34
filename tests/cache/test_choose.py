"""Which kind of cache a pattern gets, and why."""

import pytest
import torch

from headway.cache import PAGE, BatchCache, CacheSpec, PagedCache, StateSpec, choose_cache
from headway.errors import CacheError
from headway.patterns import Causal, Full, GlobalKeys, PerHead, Sink, Window


def test_the_choice_and_its_reasons() -> None:
    whole = choose_cache(PerHead(Window.last(3), Causal()))
    assert (whole.what, whole.why) == ("growing", "by Causal() a later query may see any earlier key")
    bounded = choose_cache(Window.last(3) | (Causal() & (Sink(2) | GlobalKeys())))
    assert bounded.what == "window"
    assert "the last 2 and the first 2 and global ones: 5 tokens and global ones are enough" in bounded.why
    with pytest.raises(CacheError, match="its queries may see later tokens"):
        choose_cache(Full())
    with pytest.raises(CacheError, match="its queries may see later tokens"):
        PagedCache(CacheSpec(kv_heads=1, head_dim=1), [Full()])
    with pytest.raises(CacheError, match="sizes must be positive, got kv_heads=0"):
        CacheSpec(kv_heads=0, head_dim=1)
    with pytest.raises(CacheError, match=r"got torch\.int16"):
        CacheSpec(kv_heads=1, head_dim=1, dtype=torch.int16)
    states = PagedCache(
        CacheSpec(kv_heads=1, head_dim=1), [Causal()], [StateSpec("sums", (((1,), torch.float32),))]
    )
    assert BatchCache(states, 1).slots == (0,)


def test_a_step_without_room_changes_nothing() -> None:
    spec, pattern = CacheSpec(kv_heads=1, head_dim=1), Window.last(9) | (Causal() & GlobalKeys())
    cache = BatchCache(PagedCache(spec, [pattern], budget=2 * PAGE * 8), 1)
    ids = torch.arange(3 * PAGE)[None]
    marked = cache.next_tokens(3 * PAGE).with_global(ids % 5 == 0)
    with pytest.raises(CacheError, match="a step of 1 texts takes"), cache.step(marked):
        pass
    assert (cache.lengths, cache.tables[0].globals) == ((0,), set())
    with cache.step(cache.next_tokens(4)):
        pass
    assert cache.lengths == (4,)
