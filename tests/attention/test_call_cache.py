"""Repeated calls: the cache of calls decides only how the next call runs, never what it computes."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys, call_cache
from headway.errors import BackendError, PatternError
from headway.patterns import Causal, Full, Pattern, PerHead, Window
from headway.scores import SoftCap
from headway.tokens import Tokens
from tests.native.presence import needs_kernels
from tests.tolerance import assert_within_reference

pytestmark = needs_kernels
EXP2_OF_BF16 = 1.3e-4
"""The relative error of the kernels' exponential in bfloat16, and a rounding (csrc/vec.h)."""
PATTERNS: list[Pattern] = [Full(), Causal(), Window.last(5)]


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    call_cache._known.clear()
    yield
    call_cache._known.clear()


def made(count: int, keys: int, dtype: torch.dtype = torch.float32, heads: int = 4) -> tuple[Tensor, ...]:
    """Returns q, k, v of `count` queries and `keys` keys."""
    q = torch.randn(2, heads, count, 16, dtype=dtype)
    k, v = (torch.randn(2, 2, keys, 16, dtype=dtype) for _ in range(2))
    return q, k, v


def unrounded_keys(part: KeyValues) -> KeyValues:
    """Returns the stored keys and values in float64, int8 ones multiplied by their scales without rounding."""
    wide = part.map(lambda x: x.double())
    if not part.is_int8:
        return wide
    return KeyValues(wide.k * wide.k_scale[..., None], wide.v * wide.v_scale[..., None], part.tokens)


def sides(count: int, keys: int) -> dict[str, Tokens]:
    return {"q_tokens": Tokens.range(count, keys - count), "k_tokens": Tokens.range(keys)}


one_call = st.tuples(
    st.integers(1, 3),
    st.sampled_from([7, 70]),
    st.sampled_from(PATTERNS),
    st.sampled_from([None, 0.5]),
    st.sampled_from(["plain", "int8", "strided", "transposed", "turned"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 3]),
)


@given(st.lists(one_call, min_size=2, max_size=8))
def test_any_sequence_of_calls_gives_what_each_of_them_gives_alone(calls: list) -> None:
    call_cache._known.clear()
    for count, keys, pattern, scale, kind, dtype, further in calls + calls:
        q, k, v = made(count, keys, dtype)
        at = {
            "q_tokens": Tokens.range(count, keys - count + further),
            "k_tokens": Tokens.range(keys, further),
        }
        if kind == "strided":
            k = torch.cat((k, k), 3)[..., 16:]
        elif kind == "transposed":
            v = v.transpose(1, 2).contiguous().transpose(1, 2)
        elif kind == "turned":
            k = k.transpose(2, 3).contiguous().transpose(2, 3)
        part = KeyValues(k, v, at["k_tokens"])
        part = part.quantized() if kind == "int8" else part
        actual = attend_keys(q, at["q_tokens"], [part], pattern, scale=scale, backend="native")
        plain = part.dequantized(dtype)
        dense = [
            attend_keys(q.to(keys.k.dtype), at["q_tokens"], [keys], pattern, scale=scale, backend="dense")
            for keys in (unrounded_keys(part), plain)
        ]
        assert_within_reference(actual.out, dense[0].out, dense[1].out, f"{pattern} {kind}")
        if dtype == torch.float32:
            assert_within_reference(actual.lse, dense[0].lse, dense[1].lse, "lse")
        # Kernels that compute bfloat16 in float32 do not round the dequantized int8 keys.
        largest_score = q.double().norm(dim=-1).max() * plain.k.double().norm(dim=-1).max() * (scale or 0.25)
        unrounded = 2**-9 * largest_score if kind == "int8" else 0.0
        assert (actual.lse - dense[0].lse).abs().max() <= EXP2_OF_BF16 + unrounded
    assert len(call_cache._known) == len({call for call in calls if "turned" not in call}), (
        "its rows must be copied"
    )


def test_a_call_that_differs_in_one_thing_is_another_call() -> None:
    q, k, v = made(3, 70)
    defaults = {"pattern": Causal(), **sides(3, 70)}
    changes = (
        {},
        {"scale": 0.5},
        {"pattern": Window.last(5)},
        {"q_tokens": Tokens.range(3, 9)},
        {"k_tokens": Tokens.range(70, 1)},
    )
    for change in changes * 2:
        native, dense = (attend(q, k, v, **{**defaults, **change}, backend=b) for b in ("native", "dense"))
        torch.testing.assert_close(native, dense, rtol=1e-5, atol=1e-5)
    assert len(call_cache._known) == len(changes)


def test_the_second_call_is_neither_checked_nor_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = made(1, 300)
    at = sides(1, 300)
    first = attend(q, k, v, Causal(), **at, backend="native")
    monkeypatch.setattr(call_cache, "remember", None)
    assert torch.equal(attend(q, k, v, Causal(), **sides(1, 300), backend="native"), first)
    with pytest.raises(TypeError, match="not callable"):
        attend(q, k, v, Causal(), q_tokens=Tokens.range(1, 298), k_tokens=at["k_tokens"], backend="native")


def test_what_cannot_be_is_an_error_every_time() -> None:
    q, k, v = made(2, 9)
    at = sides(2, 9)
    attend(q, k, v, Causal(), **at, backend="native")
    wrong: list[tuple[dict, type[Exception]]] = [
        ({"k": k[:, :, 1:]}, PatternError),
        ({"v": v.bfloat16()}, PatternError),
        ({"k": k.double(), "q": q.double(), "v": v.double()}, BackendError),
        ({"scale": float("nan")}, PatternError),
        ({"pattern": "causal"}, PatternError),
        ({"dropout": 1.5}, PatternError),
        ({"keep": torch.ones(1)}, PatternError),
        ({"k_scale": torch.ones(2, 2, 9)}, PatternError),
        ({"backend": "nativ"}, BackendError),
        ({"q_tokens": Tokens.range(2, 7).with_position(torch.zeros(3, 2, dtype=torch.int64))}, PatternError),
    ]
    for _ in range(2):
        for change, error in wrong:
            with pytest.raises(error):
                attend(**{"q": q, "k": k, "v": v, "pattern": Causal(), "backend": "native", **at} | change)


def test_gradients_scores_dropout_and_masks_are_seen_after_a_call_without() -> None:
    q, k, v = made(6, 6)
    at = sides(6, 6)
    plain = attend(q, k, v, Causal(), **at, backend="native")
    leaf = q.clone().requires_grad_()
    out = attend(leaf, k, v, Causal(), **at, backend="native")
    assert out.requires_grad
    assert torch.equal(out.detach(), plain)
    assert not torch.equal(attend(q, k, v, Causal(), **at, score=SoftCap(0.1), backend="native"), plain)
    assert not torch.equal(attend(q, k, v, Causal(), **at, dropout=0.5, seed=1, backend="native"), plain)
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    seen[..., 0] = False
    assert not torch.equal(attend(q, k, v, Full(), **at, keep=seen), attend(q, k, v, Full(), **at))
    by_head = attend(q, k, v, PerHead(Full(), Full(), Causal(), Causal()), **at, backend="native")
    torch.testing.assert_close(by_head[:, 2:], plain[:, 2:])
    with torch.no_grad():
        assert torch.equal(attend(leaf, k, v, Causal(), **at, backend="native"), plain)


def test_tokens_that_only_data_can_tell_are_looked_at_every_time() -> None:
    q, k, v = made(8, 8)
    plain = attend(q, k, v, Full(), **sides(8, 8), backend="native")
    ragged, packed = Tokens.from_lengths([3, 8]), Tokens.packed([3, 5])
    for tokens in (ragged, packed):
        actual = attend(q, k, v, Full(), q_tokens=tokens, k_tokens=tokens, backend="native")
        assert not torch.equal(actual, plain)
    assert len(call_cache._known) == 1


def test_a_step_over_tokens_that_change_is_looked_at_again() -> None:
    """A decode step over a ring cache is looked up while the ring's tokens are unchanged, then planned again."""
    ring, queries = Tokens(torch.arange(64).roll(13)[None]), Tokens(torch.tensor([[63]]))
    q, k, v = made(1, 64)
    for backend in ("native", "sdpa"):
        ring.index.copy_(torch.arange(64).roll(13)[None])
        known = len(call_cache._known)
        arguments = {"q_tokens": queries, "k_tokens": ring, "backend": backend}
        first = attend(q, k, v, Window.last(5), **arguments)
        assert torch.equal(attend(q, k, v, Window.last(5), **arguments), first)
        assert len(call_cache._known) == known + 1
        ring.index.copy_(ring.index.flip(1).clone())
        second = attend(q, k, v, Window.last(5), **arguments)
        assert not torch.equal(second, first)
        plain = attend(q, k, v, Window.last(5), q_tokens=queries, k_tokens=ring, backend="dense")
        torch.testing.assert_close(second, plain)


def test_it_holds_no_tensor_of_the_call_and_few_forms() -> None:
    for n in range(call_cache.KEPT + 5):
        q, k, v = made(1, 3 + n)
        attend(q, k, v, Causal(), **sides(1, 3 + n), backend="native")
        assert len(call_cache._known) <= call_cache.KEPT
    reference = weakref.ref(k)
    del q, k, v
    assert reference() is None
