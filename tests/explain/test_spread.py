"""Gaps between contenders, on invented numbers."""

import math
import statistics

import pytest
import torch

from headway_lab.explain.spread import Gap, every, gap, log_gap


def test_a_gap_is_the_paired_t_interval() -> None:
    """The oracle is the formula written out: n = 4, t = 3.182."""
    a, b = [2.0, 2.2, 1.9, 2.4], [1.5, 1.9, 1.3, 2.0]
    apart = [x - y for x, y in zip(a, b, strict=True)]
    interval = gap(a, b)
    assert interval.mean == pytest.approx(sum(apart) / 4)
    variance = sum((x - interval.mean) ** 2 for x in apart) / 3
    assert interval.bound == pytest.approx(3.182 * math.sqrt(variance / 4))
    assert interval.higher
    assert not interval.lower
    assert gap(b, a).lower


def test_what_every_seed_shares_is_no_spread() -> None:
    """Seeds that differ by 1 do not hide a gap of 0.01 that all of them show."""
    base = [1.0, 2.0, 3.0]
    assert gap([x + 0.01 + 0.001 * i for i, x in enumerate(base)], base).seen
    assert not gap([1.01, 1.99, 3.005], base).seen
    assert not gap(base, base).seen, "equal is not a difference"


def test_what_is_not_seen_is_neither_higher_nor_lower() -> None:
    for mean in (0.05, -0.05):
        clear, lost = Gap(mean, 0.01), Gap(mean, 0.1)
        assert (clear.higher, clear.lower) == (mean > 0, mean < 0)
        assert (lost.higher, lost.lower) == (None, None), "too small to tell"


def test_where_nothing_differs_one_run_in_twenty_says_otherwise() -> None:
    """The quantiles of t are right: of 4000 draws without a difference 5 % are seen, within four standard
    deviations."""
    noise = torch.Generator().manual_seed(0)
    for seeds in (2, 3, 4, 6, 10):
        draws = torch.randn(4000, seeds, generator=noise, dtype=torch.float64)
        share = statistics.fmean(gap(row, [0.0] * seeds).seen for row in draws.tolist())
        assert share == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 4000)), seeds


def test_what_is_shown_to_be_small_has_a_small_bound_too() -> None:
    assert Gap(0.01, 0.01).within(0.05) is True
    assert Gap(0.01, 0.1).within(0.05) is None, "no difference seen is none shown"
    assert Gap(-0.1, 0.01).within(0.05) is False
    assert Gap(-0.1, 0.01).below(0.05) is True
    assert Gap(0.0, 0.06).below(0.05) is None
    assert Gap(0.1, 0.01).below(0.05) is False
    half = log_gap([1.0, 1.1, 0.9], [2.0, 2.2, 1.8])
    assert half.factor == pytest.approx((0.5, 0.5, 0.5))
    assert half.lower


def test_all_are_shown_unless_one_is_refuted_or_does_not_tell() -> None:
    assert every([True, True]) is True
    assert every([True, None]) is None
    assert every([None, False, True]) is False
