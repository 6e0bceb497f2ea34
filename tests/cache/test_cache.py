"""What every cache promises: errors, copies, memory, gradients, dtypes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.cache import CacheSpec, Growing, KVCache, Ring
from headway.errors import CacheError
from headway.patterns import Retention
from headway.tokens import Tokens

KINDS = ["growing", "ring"]


def make(kind: str, batch: int = 2, **rest: Any) -> KVCache:
    spec = CacheSpec(**{"batch": batch, "kv_heads": 2, "head_dim": 4, "value_dim": 3, **rest})
    return KVCache.of(Growing() if kind == "growing" else Ring(Retention(3)), spec)


def draw(count: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, count, 4).to(dtype), torch.randn(batch, 2, count, 3).to(dtype)


def state(cache: KVCache) -> tuple[Any, ...]:
    return cache.lengths, *(t.clone() for t in (*cache.tensors, cache.table.tokens.index))


def assert_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert a[0] == b[0]
    assert all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True))


BAD_CHUNKS = {
    "heads": (
        lambda: (torch.zeros(2, 1, 1, 4), torch.zeros(2, 2, 1, 3)),
        "k must be .* = [2, 2, 1, 4] .* got [2, 1, 1, 4]",
    ),
    "batch": (lambda: (torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 3)), "got [3, 2, 1, 4]"),
    "value size": (
        lambda: (torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)),
        "v must be .* = [2, 2, 1, 3] .* got [2, 2, 1, 4]",
    ),
    "count": (lambda: draw(2), "these 1 tokens, got [2, 2, 2, 4]"),
    "dtype": (
        lambda: draw(1, dtype=torch.bfloat16),
        "k is torch.bfloat16 on cpu, the cache holds torch.float32 on cpu",
    ),
    "gradient": (
        lambda: (draw(1)[0].requires_grad_(), draw(1)[1]),
        "k requires a gradient, and a cache holds none: decode under torch.no_grad()",
    ),
    "gradient of v": (lambda: (draw(1)[0], draw(1)[1].requires_grad_()), "v requires a gradient"),
}
BAD_TOKENS = {
    "behind": (
        Tokens.range(1, start=4),
        "row 0 has seen 5 tokens, so the next index is 5, but the chunk's first is 4; number it from there "
        "(Tokens.range(1, start=5)",
    ),
    "ahead": (Tokens.range(1, start=6), "the next index is 5, but the chunk's first is 6"),
    "one row ahead": (Tokens(torch.tensor([[5], [6]])), "row 1 has seen 5 tokens, so the next index is 5"),
    "documents": (Tokens.packed([[0, 1], [1]]), "row 1 has seen 5 tokens, so the next index is 5"),
    "a document ahead": (
        Tokens(torch.tensor([[1]]), document=torch.tensor([[7]])),
        "document 7 of row 0 has seen 0 tokens, so the next index is 0, but the chunk's first is 1",
    ),
    "rows": (Tokens(torch.full((3, 1), 5)), "tokens of 3 rows for a cache of 2"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", BAD_CHUNKS)
def test_a_chunk_that_does_not_fit_is_refused_and_leaves_the_cache_alone(kind: str, what: str) -> None:
    cache = make(kind)
    cache.update(*draw(5), Tokens.range(5))
    before = state(cache)
    chunk, message = BAD_CHUNKS[what]
    with pytest.raises(CacheError, match=re.escape(message).replace(r"\.\*", ".*")):
        cache.update(*chunk(), Tokens.range(1, start=5))
    assert_same(before, state(cache))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", BAD_TOKENS)
def test_tokens_that_do_not_go_on_are_refused_and_leave_the_cache_alone(kind: str, what: str) -> None:
    cache = make(kind)
    cache.update(*draw(5), Tokens.range(5))
    before = state(cache)
    tokens, message = BAD_TOKENS[what]
    with pytest.raises(CacheError, match=re.escape(message)):
        cache.update(*draw(1), tokens)
    assert_same(before, state(cache))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [[0, 2], [1, 0], [0, 0]])
def test_tokens_out_of_order_are_refused(kind: str, index: list[int]) -> None:
    with pytest.raises(CacheError, match=re.escape(f"row 1 has indices {index}")):
        make(kind).update(*draw(2), Tokens(torch.tensor([[0, 1], index])))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_that_are_all_the_first_are_none(kind: str) -> None:
    tokens = Tokens(torch.arange(3)[None], document=torch.zeros(1, 3, dtype=torch.int64))
    keys = make(kind).update(*draw(3), tokens)
    assert keys.tokens.document is None
    assert keys.tokens.start == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "message"),
    [
        (6, "row 0 has seen 5 tokens and cannot forget 6"),
        (-1, "cannot forget -1"),
        ([1], "one for each of the 2 rows, got [1]"),
        (torch.tensor([1, 7]), "row 1 has seen 5 tokens and cannot forget 7"),
        (torch.tensor([0.5, 1.0]), "give one whole number"),
    ],
)
def test_what_cannot_be_taken_back_is_refused(kind: str, n: Any, message: str) -> None:
    cache = make(kind)
    cache.update(*draw(5), Tokens.range(5))
    before = state(cache)
    with pytest.raises(CacheError, match=re.escape(message)):
        cache.trim(n)
    assert_same(before, state(cache))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[0, 2], [-1], torch.tensor([[0]])])
def test_rows_that_do_not_exist_are_refused(kind: str, rows: Any) -> None:
    cache = make(kind)
    cache.update(*draw(5), Tokens.range(5))
    before = state(cache)
    with pytest.raises(CacheError, match=r"reorder: rows must be a list of numbers in 0\.\.1"):
        cache.reorder(rows)
    assert_same(before, state(cache))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["kv_heads", "head_dim", "value_dim"])
def test_sizes_must_be_positive(kind: str, name: str) -> None:
    with pytest.raises(CacheError, match=f"sizes must be positive, got {name}=0"):
        make(kind, **{name: 0})
    with pytest.raises(CacheError, match="batch=-1"):
        make(kind, batch=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_under_no_grad_parameters_may_be_stored_and_no_graph_is_kept(kind: str) -> None:
    cache = make(kind)
    k, v = (x.requires_grad_() for x in draw(6))
    with torch.no_grad():
        cache.update(k, v, Tokens.range(6))
    keys = cache.update(*draw(1), Tokens.range(1, start=6))
    assert not keys.k.requires_grad
    assert not cache.tensors[0].requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_filled_in_inference_mode_can_go_on_outside(kind: str) -> None:
    with torch.inference_mode():
        cache = make(kind)
        tokens = Tokens.range(6).with_global([0]).with_position(torch.arange(3, 9)[None])
        cache.update(*draw(6), tokens)
        copied = cache.fork()
        copied.reorder([1, 0])
    for each in (cache, copied):
        keys = each.update(*draw(1), Tokens.range(1, start=6))
        assert keys.k.isfinite().all()
        each.trim(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_is_kept(kind: str, dtype: torch.dtype) -> None:
    cache = make(kind, dtype=dtype)
    for count in (2, 9, 1):
        keys = cache.update(*draw(count, dtype=dtype), Tokens.range(count, start=cache.lengths[0]))
        assert keys.k.dtype == keys.v.dtype == cache.dtype == dtype
    assert cache.nbytes == cache.capacity * 2 * 2 * (4 + 3) * dtype.itemsize


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_and_its_origin_do_not_see_each_other(kind: str) -> None:
    cache = make(kind)
    cache.update(*draw(5), Tokens.range(5).with_global([1]).with_position(torch.arange(5)[None] + 2))
    copied, before = cache.fork(), state(cache)
    copied.update(*draw(1), Tokens.range(1, start=5))
    copied.trim(1)
    copied.reorder([0])
    assert_same(before, state(cache))
    other = copied.fork()
    mine = state(other)
    copied.update(*draw(9, 1), Tokens.range(9, start=5))
    assert_same(mine, state(other))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_become_more_or_fewer_or_none(kind: str) -> None:
    cache = make(kind)
    k, v = draw(3)
    cache.update(k, v, Tokens(torch.tensor([[0, 1, 2], [0, 1, -1]])))
    cache.reorder([1, 1, 0])
    assert cache.lengths == (2, 2, 3)
    assert torch.equal(cache.tensors[0][:, :, :2], k[[1, 1, 0], :, :2])
    cache.reorder(torch.tensor([2]))
    assert cache.lengths == (3,)
    keys = cache.update(*draw(1, 1), Tokens.range(1, start=3))
    assert keys.tokens.start == 0
    cache.reorder([])
    assert (cache.batch, cache.slots) == (0, 0)
    assert cache.update(*draw(2, 0), Tokens.range(2)).k.shape[0] == 0


def test_a_growing_cache_doubles_and_makes_room_when_told() -> None:
    cache = make("growing")
    sizes = []
    for i in range(20):
        keys = cache.update(*draw(1), Tokens.range(1, start=i))
        sizes.append(cache.capacity)
        assert keys.tokens.start == 0
        assert keys.tokens.count == i + 1
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32]
    cache = make("growing")
    cache.reserve(100)
    where = cache.tensors[0].data_ptr()
    for i in range(10):
        keys = cache.update(*draw(10), Tokens.range(10, start=10 * i))
        assert keys.k.data_ptr() == where
    assert cache.capacity == 100
    cache.reserve(5)
    assert cache.capacity == 100
    assert cache.bound is None


def test_new_slots_are_zeros() -> None:
    cache = make("growing")
    cache.reserve(8)
    cache.update(*draw(3), Tokens(torch.tensor([[0, 1, 2], [-1, -1, -1]])))
    assert not cache.tensors[0][:, :, 3:].any()
    assert not cache.tensors[1][1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_positions_travel_with_their_tokens(kind: str) -> None:
    """From the first chunk that has positions of its own; before it they are the indices."""
    cache = make(kind)
    cache.update(*draw(2), Tokens.range(2))
    cache.update(*draw(1), Tokens.range(1, start=2).with_position(torch.tensor([[7], [9]])))
    keys = cache.update(*draw(1), Tokens.range(1, start=3))
    positions = keys.tokens.positions.expand(2, -1)
    index = keys.tokens.index.expand(2, -1)
    for b, moved in enumerate((7, 9)):
        assert dict(zip(index[b].tolist(), positions[b].tolist(), strict=True)) == {
            0: 0,
            1: 1,
            2: moved,
            3: 3,
        }


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_is(kind: str) -> None:
    text = repr(make(kind))
    assert "kv_heads=2, head_dim=4, lengths=[0, 0]" in text
    assert ("bound=None" in text) == (kind == "growing")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_bytes_shrink_with_the_kv_heads_exactly(kind: str, kv_heads: int) -> None:
    """Row 51: g kv heads of 8 take g / 8 of the bytes, filled and full."""
    few, all_heads = make(kind, kv_heads=kv_heads), make(kind, kv_heads=8)
    for count in (3, 30):
        for cache, heads in ((few, kv_heads), (all_heads, 8)):
            k, v = torch.zeros(2, heads, count, 4), torch.zeros(2, heads, count, 3)
            cache.update(k, v, Tokens.range(count, start=cache.lengths[0]))
        assert few.nbytes * 8 == all_heads.nbytes * kv_heads
