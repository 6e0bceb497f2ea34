"""The topics rotary-decay (requirements 65-68) and permutation (16), and that their verdicts can be negative."""

from dataclasses import replace

import torch

from headway.patterns import Causal, Full
from headway.positions import NoPositions, Rotary
from headway_lab.explain import explain, permutation, rotary_decay


def test_decay_is_not_seen_where_it_is_not() -> None:
    flat, ones = torch.full((257,), 32.5), torch.ones(257)
    falling = torch.linspace(32.5, 6, 257)
    bumpy = falling.clone()
    bumpy[100] += 1
    fading = torch.linspace(1, 0.2, 257)

    def seen(*columns: torch.Tensor) -> bool:
        return rotary_decay.judge({str(n): column for n, column in enumerate(columns)}).seen

    assert seen(bumpy, flat, ones / 2, ones / 2, fading)
    for changed in (
        (flat, flat, ones / 2, ones / 2, fading),
        (falling, flat, ones / 2, ones / 2, fading),
        (bumpy, bumpy, ones / 2, ones / 2, fading),
        (bumpy, flat, ones * 1.01, ones / 2, fading),
        (bumpy, flat, ones / 2, ones * 0.6, fading),
        (bumpy, flat, ones / 2, ones / 2, ones),
    ):
        assert not seen(*changed)


def test_order_is_seen_only_with_positions() -> None:
    report = explain("permutation")
    assert report.seen
    assert report.column("largest difference")[0] <= 1e-6
    assert report.column("order is seen") == [False, True, True, True, True]
    rows = list(report.rows)
    assert not permutation.judge([{**rows[0], "largest difference": 0.5}, *rows[1:]]).seen
    assert not permutation.judge([*rows[:2], {**rows[2], "least difference": 0.0}, *rows[3:]]).seen


def test_shuffle_error_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert permutation.shuffle_error(NoPositions(), Full(), 0) < 1e-14
    assert permutation.shuffle_error(Rotary(pairing="adjacent"), Full(), 0) > 0.01
    assert permutation.shuffle_error(NoPositions(), Causal(), 0) > 0.01
    assert torch.equal(torch.rand(1), expected)


def test_verdicts_never_refute() -> None:
    report = explain("permutation")
    refuted = replace(report, claims=dict.fromkeys(report.claims, False))
    assert refuted.verdict.startswith("not seen at this size")
