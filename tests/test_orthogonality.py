"""Patterns x heads x rotary pairings x tokens x backends, and x caches, are orthogonal: all combinations are right.

Every combination must equal plain float64 attention within twice the error of the same formula written naively in the
dtype at hand.
"""

import pytest
import torch
from torch import Tensor

from headway.attention import attend
from headway.cache import BatchCache, CacheSpec, PagedCache
from headway.errors import BackendError, CacheError
from headway.native import loader as native
from headway.patterns import (
    Causal,
    Chunk,
    Full,
    Global,
    GlobalKeys,
    GlobalQueries,
    Pattern,
    PerHead,
    Sink,
    Window,
    parse,
)
from headway.positions import NoPositions, Rotary
from headway.tokens import Tokens
from tests.cache.layers import attended
from tests.naive import naive, with_gradients
from tests.pairwise import pairwise
from tests.tolerance import assert_within_reference

PATTERNS = [
    Full(),
    Causal(),
    Window.last(5),
    Window.around(4),
    Window(2, 7),
    Window.last(4, step=3),
    Window.around(3, step=2),
    Window.last(6) | Causal() & Sink(3),
    Chunk(5),
    Chunk(24) & Causal() | Sink(2) & Causal(),
    Window.last(3, step=2) | Causal() & GlobalKeys(),
    Window.around(3) | Global(),
    Causal() | GlobalKeys() & GlobalQueries(),
    PerHead(*([Window.last(4)] * 2 + [Causal()] * 3 + [Window.last(3, step=2)])),
]
HEADS = [(6, 6), (6, 3), (6, 1)]
POSITIONS = [
    Rotary(pairing="halves"),
    Rotary(pairing="adjacent"),
    Rotary(pairing="halves", dims=4, theta=100.0),
    NoPositions(),
]
BACKENDS = ["auto", "native", "dense", "sdpa", "banded", "diagonal"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOKENS = ["range", "left", "right", "packed", "global"]
LENGTHS = [1, 2, 17, 67, 131]


def tokens_of(kind: str, n: int) -> Tokens:
    if kind == "packed":
        return Tokens.packed([[n // 3, n - n // 3], [n // 2]], n)
    if kind in ("left", "right"):
        return Tokens.from_lengths([n, n - n // 3], n, kind)
    return Tokens.range(n).with_global([[0, n // 2], [n - 1]]) if kind == "global" else Tokens.range(n)


Case = tuple[Pattern, tuple[int, int], Rotary | NoPositions, str, str, torch.dtype, int]


def check(
    pattern: Pattern, heads: tuple[int, int], positions, backend: str, kind: str, dtype: torch.dtype, n: int
):  # type: ignore[no-untyped-def]
    if backend == "diagonal" and n > 70:
        n = 67
    if backend == "native" and (dtype == torch.float64 or native.library() is None):
        backend = "auto"
    tokens = tokens_of(kind, n)
    shape = [(2, h, n, 8) for h in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(s, dtype=torch.float64).to(dtype) for s in shape)
    grad = torch.randn(q.shape, dtype=torch.float64).to(dtype)

    def rotated(x: Tensor) -> Tensor:
        return positions.rotate(x, tokens.positions) if isinstance(positions, Rotary) else x

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return naive(rotated(q), rotated(k), v, pattern, tokens, tokens)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(rotated(q), rotated(k), v, pattern, q_tokens=tokens, k_tokens=tokens, backend=backend)

    exact = with_gradients(plain, grad.double(), q.double(), k.double(), v.double())
    low = with_gradients(plain, grad, q, k, v)
    for actual, truth, reference, quantity in zip(
        with_gradients(ours, grad, q, k, v), exact, low, ("out", "dq", "dk", "dv"), strict=True
    ):
        assert_within_reference(actual, truth, reference, quantity, terms=8**0.5)


AXES = (PATTERNS, HEADS, POSITIONS, BACKENDS, TOKENS, DTYPES, LENGTHS)


def name(case: Case) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in case)


@pytest.mark.parametrize("case", pairwise(*AXES[:5], DTYPES[:2], LENGTHS), ids=name)
def test_every_pair_of_choices(case: Case) -> None:
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_product(pattern: Pattern, backend: str) -> None:
    for heads in HEADS:
        for positions in POSITIONS[:3]:
            for kind in TOKENS:
                for dtype in DTYPES:
                    for n in (2, 67):
                        check(pattern, heads, positions, backend, kind, dtype, n)


CAUSAL = [p for p in PATTERNS if p.is_causal]


def through_cache(pattern: Pattern, heads: tuple[int, int], positions, dtype: torch.dtype, split) -> None:  # type: ignore[no-untyped-def]
    """Checks that prefill in pieces through a cache equals one full forward."""
    n = sum(split)
    q, k, v = (torch.randn(2, h, n, 8).to(dtype) for h in (heads[0], heads[1], heads[1]))
    tokens = Tokens.range(n)
    if "GlobalKeys" in str(pattern):
        tokens = tokens.with_global([[0, n // 2], [2]])

    def rotated(x: Tensor, at: Tokens) -> Tensor:
        return positions.rotate(x, at.positions) if isinstance(positions, Rotary) else x

    def whole(t: torch.dtype) -> Tensor:
        return naive(rotated(q.to(t), tokens), rotated(k.to(t), tokens), v.to(t), pattern, tokens, tokens)

    spec = CacheSpec(kv_heads=heads[1], head_dim=8, dtype=dtype)
    cache, begin, outs = BatchCache(PagedCache(spec, [pattern]), 2), 0, []
    with torch.no_grad():
        for size in split:
            part = slice(begin, begin + size)
            at = tokens.slice(begin, begin + size)
            chunk = rotated(q[:, :, part], at), rotated(k[:, :, part], at), v[:, :, part]
            outs.append(attended(cache, at, *chunk, pattern))
            begin += size
    assert_within_reference(torch.cat(outs, 2), whole(torch.float64), whole(dtype), str(pattern))


SPLITS = [(1,) * 19, (67, 1), (7, 1, 1, 10), (61, 3, 3, 1), (16, 1, 1, 1)]


@pytest.mark.parametrize("case", pairwise(CAUSAL, HEADS, POSITIONS, DTYPES, SPLITS), ids=name)
def test_every_pair_of_choices_through_a_cache(case) -> None:  # type: ignore[no-untyped-def]
    through_cache(*case)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", CAUSAL, ids=str)
def test_the_whole_product_through_caches(pattern: Pattern) -> None:
    for heads in HEADS:
        for positions in POSITIONS:
            for dtype in DTYPES:
                for split in SPLITS:
                    through_cache(pattern, heads, positions, dtype, split)


def test_what_cannot_be_is_refused_not_replaced() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(
        BackendError,
        match=r'backend="sdpa" cannot run this call: it does not support dropout; .*would take (native|dense)',
    ):
        attend(q, q, q, Causal(), dropout=0.1, backend="sdpa")
    with pytest.raises(BackendError, match=r"unknown backend 'band'.*banded"):
        attend(q, q, q, Causal(), backend="band")
    with pytest.raises(CacheError, match="Full"):
        PagedCache(CacheSpec(kv_heads=1, head_dim=8), [parse("Full")])
