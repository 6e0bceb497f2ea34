"""The native kernels see exactly the visible keys: weights, dropout, and how far bad numbers spread."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.patterns import Causal, Global, Sink, Window
from tests.native.calls import DTYPES, PATTERNS, TOKENS, equal, outcome, problem
from tests.native.conftest import Use, at_levels
from tests.native.plain import Problem
from tests.pairwise import pairwise


def weights(case: Problem) -> Tensor:
    """Returns the weights [B, H, T, S]: the output if value j is the j-th unit vector."""
    rows, heads, keys, _ = case.k.shape
    eye = torch.eye(keys, dtype=case.q.dtype).expand(rows, heads, keys, keys)
    return replace(case, v=eye).run().out


@at_levels(0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_0_exactly_where_a_key_is_not_visible(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    for pattern, kind in pairwise(PATTERNS, TOKENS):
        case = problem(pattern, kind, 131, (6, 2), (8, 8), dtype)
        assert torch.equal(weights(case) != 0, case.visible), (pattern, kind)


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_dropout_drops_is_known_beforehand(use: Use, level: str, dtype: torch.dtype) -> None:
    """Bit for bit those of attention/dropout.py: for any seed, number of keys before, and order of slots."""
    use(level)
    for kind, seed in zip(TOKENS, (0, 1, -5, 2**31, 2**40 + 7, 2**62, 3, 4), strict=True):
        case = problem(Window.around(70, step=2) | Global(), kind, 131, (6, 2), (8, 8), dtype)
        case = replace(case, more={"dropout": 0.4, "seed": seed})
        for split in (None, 50):
            expected = case.visible & (case.kept != 0)
            assert torch.equal(weights(replace(case, split=split)) != 0, expected), (kind, seed, split)


@at_levels(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_slots_that_are_empty_or_unseen_may_hold_anything(
    use: Use, level: str, dtype: torch.dtype, bad: float
) -> None:
    use(level)
    for pattern, kind, width in (
        (Causal(), "left", 33),
        (Window.around(9), "right", 512),
        (Window.last(20), "chunk", 33),
    ):
        case = problem(pattern, kind, 131, (6, 2), (width, width), dtype)
        unseen = ~case.visible.any(1).any(1)[:, None, :, None]
        idle = ~case.q_tokens.valid[:, None, :, None]
        assert unseen.any()
        k, v = (t.masked_fill(unseen, bad) for t in (case.k, case.v))
        equal(outcome(replace(case, k=k, v=v, q=case.q.masked_fill(idle, bad))), outcome(case))


@at_levels(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_key_or_value_spoils_only_the_queries_that_see_it(
    use: Use, level: str, dtype: torch.dtype, bad: float
) -> None:
    use(level)
    for pattern in (Causal(), Window.last(40), Window.around(9, step=3) | Sink(1) & Causal()):
        case = problem(pattern, "range", 131, (6, 2), (64, 64), dtype)
        clean = outcome(case)
        for slot in (0, 50, 130):
            sees_slot = case.visible[..., slot]
            for name in ("k", "v"):
                t = getattr(case, name).clone()
                t[:, :, slot, 5] = bad
                actual = replace(case, **{name: t}).run()
                assert torch.equal(actual.out[~sees_slot], clean[0][~sees_slot]), (pattern, slot, name)
                assert torch.equal(actual.lse[~sees_slot], clean[1][~sees_slot]), (pattern, slot, name)
                assert not actual.out[..., 5][sees_slot].isfinite().any() or bad < 0 or name == "k"
                if bad != bad:
                    spoilt = actual.out if name == "k" else actual.out[..., 5]
                    assert spoilt[sees_slot].isnan().all(), (pattern, slot, name)


@at_levels(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_query_spoils_only_itself_and_the_keys_that_it_sees(
    use: Use, level: str, dtype: torch.dtype, bad: float
) -> None:
    use(level)
    for pattern in (Causal(), Window.last(40), Window.around(9, step=3)):
        case = problem(pattern, "range", 131, (6, 2), (64, 64), dtype)
        clean = outcome(case)
        for slot in (0, 50, 130):
            q = case.q.clone()
            q[:, :, slot, 5] = bad
            out, lse, dq, dk, dv = outcome(replace(case, q=q))
            other_slots, unseen = torch.arange(131) != slot, ~case.visible[0, 0, slot]
            for actual, expected in zip((out, lse, dq), clean[:3], strict=True):
                assert torch.equal(actual[:, :, other_slots], expected[:, :, other_slots]), (pattern, slot)
            for actual, expected in zip((dk, dv), clean[3:], strict=True):
                assert torch.equal(actual[:, :, unseen], expected[:, :, unseen]), (pattern, slot)
            assert not out[:, :, slot].isfinite().all()


@at_levels(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_query_hides_no_large_score_of_its_neighbour(use: Use, level: str, dtype: torch.dtype) -> None:
    """Rows 48 to 53 are computed together: the maximum of 48 must still be seen to rise."""
    use(level)
    case = problem(Causal(), "range", 131, (1, 1), (64, 64), dtype)
    q = case.q.clone()
    q[:, :, 48] *= 200
    clean = replace(case, q=q).run()
    q = q.clone()
    q[:, :, 50, 5] = float("nan")
    actual, other_slots = replace(case, q=q).run(), torch.arange(131) != 50
    assert clean.out.isfinite().all()
    assert clean.lse[:, :, 48].abs().max() > 100
    assert torch.equal(actual.out[:, :, other_slots], clean.out[:, :, other_slots])
    assert torch.equal(actual.lse[:, :, other_slots], clean.lse[:, :, other_slots])


@at_levels(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_gradient_spoils_only_its_query_and_the_keys_that_it_sees(
    use: Use, level: str, dtype: torch.dtype
) -> None:
    use(level)
    for pattern in (Causal(), Window.last(40), Window.around(9, step=3)):
        case = problem(pattern, "range", 131, (6, 2), (64, 64), dtype)
        leaves = [t.requires_grad_() for t in (case.q, case.k, case.v)]
        out, d_out = case.run().out, torch.randn(2, 6, 131, 64).to(dtype)
        clean = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        for slot in (0, 50, 130):
            spoilt = d_out.clone()
            spoilt[:, :, slot, 9] = float("nan")
            actual = torch.autograd.grad(out, leaves, spoilt, retain_graph=True)
            other_slots, unseen = torch.arange(131) != slot, ~case.visible[0, 0, slot]
            for x, y, rows in zip(actual, clean, (other_slots, unseen, unseen), strict=True):
                assert torch.equal(x[:, :, rows], y[:, :, rows]), (pattern, slot)
                assert x[:, :, ~rows].isnan().any()


@at_levels(7)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_0_where_nothing_is_seen(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    for pattern, kind in ((Window.last(20), "chunk"), (Causal(), "before"), (Causal(), "right")):
        case = problem(pattern, kind, 131, (6, 2), (16, 16), dtype)
        *_, dq, dk, dv = outcome(case)
        assert (dq[~case.visible.any(-1)] == 0).all()
        unseen = ~case.visible.unflatten(1, (2, 3)).any(2).any(2)
        assert unseen.any() or kind == "before"
        assert (dk[unseen] == 0).all()
        assert (dv[unseen] == 0).all()
