"""The Triton kernel that splits the keys of a decode step, run: on a GPU, or with TRITON_INTERPRET=1 on a CPU.

`test_triton.py` runs these tests in their own process, because the interpreter takes over all of Triton.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import KeyValues, attend_keys
from headway.attention.backends.triton import backend as split_decode
from headway.attention.call import Call, validate
from headway.partial import Partial
from headway.patterns import Causal, Full, GlobalKeys, Pattern, Sink, Window, visible
from headway.tokens import Tokens
from tests.naive import naive
from tests.strategies import patterns, tokens
from tests.tolerance import assert_within_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    q_tokens: Tokens,
    k_tokens: Tokens,
    chunk: int | None = None,
) -> Partial:
    return split_decode.forward(made(q, k, v, pattern, q_tokens, k_tokens), chunk=chunk)


def made(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, q_tokens: Tokens, k_tokens: Tokens) -> Call:
    """Returns the validated call, in float16 on a CPU too (which `attend` refuses as slow)."""
    q_tokens, k_tokens = q_tokens.to(q.device), k_tokens.to(q.device)
    call = validate(
        q.float(), q_tokens, [KeyValues(k.float(), v.float(), k_tokens)], pattern, None, (), None, 0.0, None
    )
    return replace(call, q=q, keys=(KeyValues(k, v, k_tokens),))


def assert_same(
    actual: Partial, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, q_tokens: Tokens, k_tokens: Tokens
) -> None:
    at = q_tokens.to(q.device), k_tokens.to(q.device)
    exact = attend_keys(
        q.double(), at[0], [KeyValues(k.double(), v.double(), at[1])], pattern, backend="dense"
    )
    assert actual.out.dtype == q.dtype
    assert torch.equal(actual.lse == -torch.inf, exact.lse == -torch.inf)
    assert_within_reference(actual.out, exact.out, naive(q, k, v, pattern, *at))
    seen = exact.lse > -torch.inf
    plain = attend_keys(q.float(), at[0], [KeyValues(k.float(), v.float(), at[1])], pattern, backend="dense")
    assert_within_reference(actual.lse[seen], exact.lse[seen], plain.lse[seen])


def qkv(
    q: Tokens, k: Tokens, group: int, dtype: torch.dtype = torch.float32, width: int = 16, value: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    rows = max(q.rows, k.rows, 2)
    shapes = ((rows, 2 * group, q.count, width), (rows, 2, k.count, width), (rows, 2, k.count, value))
    queries, keys, values = (torch.randn(s, device=DEVICE).to(dtype) for s in shapes)
    return queries, keys, values


few = tokens(st.integers(1, 5))


@given(patterns, few, tokens(), st.sampled_from([1, 3]), st.sampled_from([1, 32, 1000]))
def test_decode_is_dense_for_any_pattern_and_tokens(
    pattern: Pattern, q_tokens: Tokens, k_tokens: Tokens, group: int, chunk: int
) -> None:
    q, k, v = qkv(q_tokens, k_tokens, group)
    actual = decode(q, k, v, pattern, q_tokens, k_tokens, chunk)
    assert_same(actual, q, k, v, pattern, q_tokens, k_tokens)


PACKED = Tokens.packed([[70, 60], [30, 90, 10]], 140)
RING = Tokens(torch.arange(140).roll(33).unsqueeze(0))
STEPS = [
    (Causal(), Tokens.range(1, 139), Tokens.range(140)),
    (Full(), Tokens.range(2, 31), Tokens.range(33)),
    (Window.last(50) | Sink(4), Tokens.range(3, 120), RING),
    (Window.last(40), PACKED.slice(65, 74), PACKED),
    (Window.last(9, step=3) | GlobalKeys(), Tokens.range(16, 120), Tokens.range(140).with_global([7, 99])),
]


@pytest.mark.parametrize(
    ("dtype", "group", "width", "value"),
    [
        pytest.param(dtype, *sizes, marks=[pytest.mark.slow] if i != j else [])
        for i, dtype in enumerate(DTYPES)
        for j, sizes in enumerate([(1, 64, 64), (5, 24, 40), (9, 16, 8)])
    ],
)
def test_decode_is_dense_in_every_dtype_and_width(
    dtype: torch.dtype, group: int, width: int, value: int
) -> None:
    for pattern, q_tokens, k_tokens in STEPS:
        q, k, v = qkv(q_tokens, k_tokens, group, dtype, width, value)
        actual = decode(q, k, v, pattern, q_tokens, k_tokens, 64)
        assert_same(actual, q, k, v, pattern, q_tokens, k_tokens)


def test_the_cut_into_chunks_does_not_matter() -> None:
    pattern, q_tokens, k_tokens = STEPS[2]
    q, k, v = qkv(q_tokens, k_tokens, 4)
    whole, *cut = (decode(q, k, v, pattern, q_tokens, k_tokens, n) for n in (160, 32, 96, None))
    for part in cut:
        torch.testing.assert_close(part.out, whole.out, rtol=0, atol=4e-7)
        torch.testing.assert_close(part.lse, whole.lse, rtol=0, atol=2e-6)


def test_strides_are_taken_as_they_come() -> None:
    pattern, q_tokens, k_tokens = STEPS[0]
    q, k, v = qkv(q_tokens, k_tokens, 2)
    packed = torch.cat([k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    actual = decode(q, packed[..., :16], packed[..., 16:], pattern, q_tokens, k_tokens)
    assert torch.equal(actual.out, decode(q, k, v, pattern, q_tokens, k_tokens).out)


@pytest.mark.parametrize("case", [0, 3], ids=["one text", "two texts"])
def test_keys_in_pages_are_read_where_they_lie(case: int) -> None:
    """Pages of 64 slots lie in any order among other pages; slots without a token hold NaN."""
    pattern, q_tokens, k_tokens = STEPS[case]
    q_tokens, k_tokens = (
        Tokens(*(None if t is None else t[:1] for t in (side.index, side.document)))
        for side in (q_tokens, k_tokens)
    )
    q, k, v = (t[:1] for t in qkv(q_tokens, k_tokens, 2))
    pages, count = torch.randperm(7)[:3], k_tokens.count
    slots = (pages.unsqueeze(1) * 64 + torch.arange(64)).flatten()[:count].int().unsqueeze(0).to(DEVICE)
    stores = [
        torch.full((1, 2, 7 * 64, 16), torch.nan, device=DEVICE).index_copy(2, slots[0].long(), t)
        for t in (k, v)
    ]
    whole = made(q, k, v, pattern, q_tokens, k_tokens)
    part = KeyValues(*stores, whole.keys[0].tokens, slots=slots)
    actual = split_decode.forward(replace(whole, keys=(part,)), chunk=64)
    assert_same(actual, q, k, v, pattern, q_tokens, k_tokens)
    assert torch.equal(actual.out, split_decode.forward(whole, chunk=64).out)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_slots_that_nobody_sees_are_not_read(poison: float) -> None:
    for pattern, q_tokens, k_tokens in STEPS[2:4]:
        q, k, v = qkv(q_tokens, k_tokens, 2)
        unseen = ~visible(pattern, q_tokens, k_tokens).any(-2)[:, 0, :, None].unsqueeze(1).to(DEVICE)
        assert unseen.any()
        clean = decode(q, k, v, pattern, q_tokens, k_tokens)
        dirty = k.masked_fill(unseen, poison), v.masked_fill(unseen, poison)
        actual = decode(q, *dirty, pattern, q_tokens, k_tokens)
        assert torch.equal(actual.out, clean.out)
        assert torch.equal(actual.lse, clean.lse)


def test_several_key_sets_and_empty_ones_merge() -> None:
    pattern, q_tokens, k_tokens = STEPS[2]
    q, k, v = qkv(q_tokens, k_tokens, 2)
    whole = made(q, k, v, pattern, q_tokens, k_tokens)
    tokens = whole.keys[0].tokens
    cuts = ((0, 0), (0, 50), (50, 140))
    parts = tuple(KeyValues(k[:, :, a:b], v[:, :, a:b], tokens.slice(a, b)) for a, b in cuts)
    assert_same(split_decode.forward(replace(whole, keys=parts)), q, k, v, pattern, q_tokens, k_tokens)
