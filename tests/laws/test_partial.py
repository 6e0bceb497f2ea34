"""Laws of merging partial attention results (docs/algebra.md), in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys
from headway.partial import Partial, merge_all
from headway.patterns import Causal, Full, Global, Pattern, Window
from headway.tokens import Tokens

NAMES = ("dense", "banded")


def partial(
    q: Tensor, k: Tensor, v: Tensor, slots: list[int] | slice = slice(None), backend: str = "dense"
) -> Partial:
    """Returns the attention of q over the keys at `slots`, given as one set of keys."""
    part = KeyValues(k[:, :, slots], v[:, :, slots], Tokens(torch.arange(k.shape[2]).unsqueeze(0)[:, slots]))
    return attend_keys(q, Tokens.range(q.shape[2]), [part], Full(), backend=backend)


def tensors(queries: int = 3, keys: int = 7, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 2, n, 5, dtype=torch.float64) for n in (queries, keys, keys))
    return q * scale, k, v


def assert_same(a: Partial, b: Partial, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a.out, b.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.lse, b.lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", NAMES)
def test_the_empty_set_is_the_identity_on_either_side(backend: str) -> None:
    q, k, v = tensors()
    whole, empty = partial(q, k, v, backend=backend), partial(q, k, v, [], backend)
    assert (empty.lse == -math.inf).all()
    assert (empty.out == 0).all()
    for merged in (whole.merge(empty), empty.merge(whole)):
        assert_same(merged, whole, 1e-15)
    both = empty.merge(empty)
    assert (both.lse == -math.inf).all()
    assert (both.out == 0).all()


def test_merge_is_commutative_and_associative() -> None:
    q, k, v = tensors()
    a, b, c = (partial(q, k, v, slots) for slots in ([0, 3], [1, 2, 6], [4, 5]))
    assert_same(a.merge(b), b.merge(a))
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_same(merge_all([a, b, c]), a.merge(b).merge(c))


def test_merging_a_partial_with_itself_adds_ln_2() -> None:
    whole = partial(*tensors())
    twice = whole.merge(whole)
    assert_same(twice, Partial(whole.out, whole.lse + math.log(2)))


@given(
    st.lists(st.integers(0, 3), min_size=9, max_size=9), st.sampled_from([1.0, 300.0]), st.sampled_from(NAMES)
)
def test_any_partition_of_the_keys_gives_the_whole(owner: list[int], scale: float, backend: str) -> None:
    q, k, v = tensors(keys=9, scale=scale)
    sets = [[j for j, o in enumerate(owner) if o == i] for i in range(4)]
    whole = partial(q, k, v)
    assert_same(merge_all([partial(q, k, v, s, backend) for s in sets]), whole)
    keys = [
        KeyValues(k[:, :, s], v[:, :, s], Tokens.range(9).gather(torch.tensor([s], dtype=torch.long)))
        for s in sets
    ]
    assert_same(attend_keys(q, Tokens.range(3), keys, Full(), backend=backend), whole)


def test_huge_scores_neither_overflow_nor_lose_the_small_side() -> None:
    q, k, v = tensors(scale=1e4)
    assert_same(partial(q, k, v, [0, 1]).merge(partial(q, k, v, [2, 3, 4, 5, 6])), partial(q, k, v))


@pytest.mark.parametrize("backend", NAMES)
def test_gradcheck_through_out_and_finite_lse(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in tensors())
    part = Tokens.range(7)

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = [
            KeyValues(k[:, :, a], v[:, :, a], part.slice(a.start, a.stop)) for a in (slice(0, 3), slice(3, 7))
        ]
        result = attend_keys(q, Tokens.range(3, start=4), keys, Causal(), backend=backend)
        return result.out, result.lse

    assert torch.autograd.gradcheck(both, (q, k, v))


@pytest.mark.parametrize(
    "pattern", [Window.around(9, step=3), Window.around(2) | Global()], ids=["dilated", "scattered globals"]
)
def test_a_gradient_of_lse_reaches_its_own_query_when_slots_are_sorted(pattern: Pattern) -> None:
    """Blocked backends reorder slots; with a different weight for each lse, a wrong order would show."""
    q, k, v = (t.requires_grad_() for t in tensors(queries=40, keys=40))
    at = Tokens.range(40).with_global([3, 17, 38])
    weight = torch.linspace(-2, 3, 2 * 2 * 40, dtype=torch.float64).view(2, 2, 40)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        result = attend_keys(q, at, [KeyValues(k, v, at)], pattern, backend=backend)
        return torch.autograd.grad((result.lse * weight).sum(), (q, k))

    for ours, exact in zip(gradients("banded"), gradients("dense"), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_gradcheck_through_the_merge_of_two_results() -> None:
    q, k, v = (t.requires_grad_() for t in tensors())

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        merged = partial(q, k, v, [0, 2]).merge(partial(q, k, v, [1, 3, 4, 5, 6], "banded"))
        return merged.out, merged.lse

    assert torch.autograd.gradcheck(both, (q, k, v))


@pytest.mark.parametrize("backend", ["dense", "banded", "diagonal", "sdpa"])
def test_rows_that_see_nothing_give_0_and_pass_exactly_0(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(queries=7))
    ragged = Tokens.from_lengths([4, 0], 7, "left")
    grad = torch.randn(2, 2, 7, 5, dtype=torch.float64)
    if backend == "sdpa":
        out = attend(q, k, v, Causal(), q_tokens=ragged, k_tokens=ragged, backend=backend)
        loss = (out * grad).sum()
    else:
        result = attend_keys(q, ragged, [KeyValues(k, v, ragged)], Causal(), backend=backend)
        out = result.out
        loss = (out * grad).sum() + result.lse[0, :, 3:].sum()
    assert (out[0, :, :3] == 0).all()
    assert (out[1] == 0).all()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    for g in (dq, dk, dv):
        assert torch.isfinite(g).all()
        assert (g[0, :, :3] == 0).all()
        assert (g[1] == 0).all()
    assert (dq[0, :, 4:] != 0).any()
