"""Tolerances are tight, are never loosened, and notice the errors that they are for."""

import pytest
import torch
from torch import Tensor

from tests import tolerance
from tests.tolerance import assert_rounded_once, assert_unbiased, assert_within_reference, renewed


def test_bounds_are_no_more_than_8_times_the_worst_error_seen_unless_there_is_a_reason() -> None:
    assert tolerance.table
    for check, row in tolerance.table.items():
        for level, (bound, worst) in ((k, v) for k, v in row.items() if k != "reason"):
            assert worst <= bound <= 8 * worst or row.get("reason"), (check, level)
            assert bound <= tolerance.USUAL or row.get("reason"), (check, level)


def test_renewal_tightens_and_refuses_to_loosen() -> None:
    old = {"a": {"avx2": [2.0, 1.9], "portable": [1.0, 0.5]}, "gone": {"avx2": [2.0, 1.0]}}
    assert renewed(old, {"a": {"avx2": 0.3}, "new": {"none": 0.1}, "exact": {"none": 0.0}}) == {
        "a": {"avx2": [1.2, 0.3], "portable": [1.0, 0.5]},
        "exact": {"none": [0.0, 0.0]},
        "new": {"none": [0.4, 0.1]},
    }
    assert renewed(old, {"a": {"portable": 0.9}})["a"]["portable"] == [1.0, 0.9]
    with pytest.raises(ValueError, match=r"a at portable: 1\.1 is more than 1, which is not loosened"):
        renewed(old, {"a": {"portable": 1.1}})
    with pytest.raises(ValueError, match=r"new at none: 2\.5 is more than 2"):
        renewed(old, {"new": {"none": 2.5}})


def rounded(x: Tensor, how: str) -> Tensor:
    """Rounds float32 numbers to bf16 on their bits, in one of several ways."""
    bits = x.float().view(torch.int32)
    up = {
        "even": 0x7FFF + (bits >> 16 & 1),
        "zero": 0,
        "away": 0xFFFF,
        "up": 0x8000,
        "odd": 0x8000 - (bits >> 16 & 1),
    }
    return (bits + up[how] >> 16).to(torch.int16).view(torch.bfloat16)


def test_numbers_rounded_otherwise_are_noticed() -> None:
    x, ties = torch.randn(40, 50).double(), torch.randint(256, 512, (400,)).double()
    assert torch.equal(rounded(x, "even"), x.float().bfloat16())
    assert_rounded_once(rounded(x, "even"), x)
    for how in ("zero", "away"):
        with pytest.raises(AssertionError, match="ulp on average"):
            assert_unbiased(rounded(x, how), x)
    for how in ("up", "odd"):
        assert not torch.equal(rounded(ties, how), ties.bfloat16())
    with pytest.raises(AssertionError, match="times what a rounding makes"):
        assert_rounded_once((rounded(x, "even") * 1.02), x)


def test_errors_count_by_the_size_of_their_row() -> None:
    exact = torch.randn(9, 50).double() * torch.logspace(-6, 0, 9).double()[:, None]
    low = exact.float()
    assert_within_reference(low * (1 + 2e-7), exact, low, check="none such")
    wrong = low.clone()
    wrong[0] *= 1.0001
    with pytest.raises(AssertionError, match="times the error of the reference, 2 allowed"):
        assert_within_reference(wrong, exact, low, check="none such")
