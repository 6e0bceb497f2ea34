"""Preference losses against their formulas in float64, at both ends of their range."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.nn.preference import dpo_loss, dpo_margin, log_odds_ratio, orpo_loss

LOG_P = st.floats(-200.0, -1e-3)


@given(LOG_P, LOG_P, LOG_P, LOG_P, st.floats(0.01, 2.0))
def test_dpo_is_its_formula(c: float, r: float, ref_c: float, ref_r: float, beta: float) -> None:
    args = [torch.tensor([x], dtype=torch.float64) for x in (c, r, ref_c, ref_r)]
    margin = beta * ((c - ref_c) - (r - ref_r))
    actual = dpo_loss(args[0], args[1], (args[2], args[3]), beta)
    expected = math.log1p(math.exp(-margin)) if margin > -30 else -margin
    torch.testing.assert_close(actual, torch.tensor([expected], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert float(dpo_margin(args[0], args[1], (args[0], args[1]), beta)) == 0.0


@given(st.floats(-8.0, -1e-4), st.floats(-8.0, -1e-4), st.floats(0.01, 2.0))
def test_orpo_is_its_formula(c: float, r: float, beta: float) -> None:
    mean = [torch.tensor([x], dtype=torch.float64) for x in (c, r)]
    odds = [math.exp(x) / -math.expm1(x) for x in (c, r)]
    ratio = math.log(odds[0] / odds[1])
    torch.testing.assert_close(
        log_odds_ratio(*mean), torch.tensor([ratio], dtype=torch.float64), rtol=1e-8, atol=1e-10
    )
    tokens = (torch.tensor([3.0], dtype=torch.float64), torch.tensor([7.0], dtype=torch.float64))
    actual = orpo_loss(mean[0] * 3, mean[1] * 7, tokens, beta)
    expected = -c + beta * math.log1p(math.exp(-ratio))
    torch.testing.assert_close(actual, torch.tensor([expected], dtype=torch.float64), rtol=1e-8, atol=1e-10)


def test_gradients_stay_finite_where_an_answer_is_certain_or_impossible() -> None:
    x = torch.tensor([0.0, -1e-30, -1e-7, -0.7, -50.0, -1e4], requires_grad=True)
    y = torch.tensor([-50.0, -50.0, -1e-7, 0.0, -1e-30, -1e4], requires_grad=True)
    ones = torch.ones(6)
    orpo_loss(x, y, (ones, ones), 0.1).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert bool(torch.isfinite(y.grad).all())
