"""Tolerances from a reference's own error. The bound of each check is in tests/tolerances.json:

    check -> CPU level -> [bound, worst seen], both in units of the reference's error

A kernel may err at most twice as much as plain low precision (`USUAL`). A check that has always erred less may err at
most `MARGIN` times its worst error so far, so that a kernel that gets worse is noticed. `python -m tests.tolerance`
runs the checks and renews the table: bounds get tighter, never looser. A bound that must be looser is edited by hand,
with a "reason".
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.native import build, loader

TABLE = Path(__file__).with_name("tolerances.json")
USUAL, MARGIN = 2.0, 4.0
LEAST = {torch.float64: 16.0, torch.float32: 8.0, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Smallest error in ulps that a reference counts with, since its error on small tensors may be small by luck. In 16
bits it is that of one rounding; in float32, where it hides nothing, that of a score, its exponential, two products and
their sums; float64 is often its own reference."""

FLOOR = [torch.finfo(dtype).tiny / torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)]
"""Smallest size of an element, for sums in float32 and in float64: smaller ones may be subnormal and count as 0."""

table: dict[str, dict[str, Any]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
worst: dict[str, dict[str, float]] = {}
"""check -> CPU level -> the largest error of this process, in units of the reference's."""


def assert_within_reference(
    got: Tensor, exact: Tensor, low: Tensor, what: str = "", terms: Tensor | float = 0.0, check: str = ""
) -> None:
    """Asserts that |got - exact| <= bound of the check * max |low - exact|, both relative to the element's size.

    `exact` is float64; `low` is the same formula written naively in the dtype of `got`. The size of an element is the
    root mean square of its row, or `terms` if that is larger: the standard deviation of the terms that cancel in it
    (sqrt(D) for dOut . v of standard normal vectors), since with one visible key the true gradient of q is 0. It is at
    least `FLOOR`. Without a name `check`, the check is named by the running test and the dtype.
    """
    assert got.dtype == low.dtype, (got.dtype, low.dtype)
    assert torch.isfinite(got).all(), f"{what}: not finite"
    if not exact.numel():
        return
    size = exact.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.as_tensor(terms, dtype=torch.float64))
    size = size.clamp_min(FLOOR[got.dtype is torch.float64])
    error, allowed = (((t.double() - exact).abs() / size).nan_to_num(0.0).max().item() for t in (got, low))
    least = LEAST[got.dtype] * torch.finfo(got.dtype).eps
    check, level, ratio = check or _test(got.dtype), _level(), error / max(allowed, least)
    of_check = worst.setdefault(check, {})
    of_check[level] = max(ratio, of_check.get(level, 0.0))
    assert ratio <= bound(check, level) or renewing(), (
        f"{what} ({check}): {ratio:.3g} times the error of the reference, {bound(check, level):g} allowed"
    )


def assert_rounded_once(
    got: Tensor, exact: Tensor, what: str = "", terms: Tensor | float = 0.0, ulps: int = 1
) -> None:
    """Asserts that `got` is the float64 value `exact` rounded once, or the neighbour if `exact` is near the middle of
    two numbers, without bias to one side. `terms`, the standard deviation of the terms of a float32 sum, allows for the
    rounding of that sum. `ulps=2` allows for formulas that round twice."""
    assert torch.isfinite(got).all(), f"{what}: not finite"
    error = (got.double() - exact.to(got.dtype).double()).abs()
    allowed = ulps * ulp(exact, got.dtype) + 2**-20 * torch.as_tensor(terms, dtype=torch.float64)
    assert bool((error <= allowed).all()), (
        f"{what}: {(error / allowed).max().item():.3g} times what a rounding makes"
    )
    assert_unbiased(got, exact, what)


def assert_unbiased(got: Tensor, exact: Tensor, what: str = "") -> None:
    """Asserts that the mean error away from or towards 0 is below 0.05 ulp plus five standard deviations of that mean;
    truncation errs by half an ulp. Errors of more than two ulps count as two. Since errors within a row may be
    correlated, the deviation is the larger of those computed from rows and from single numbers."""
    error = ((got.double() - exact) * exact.sign() / ulp(exact, got.dtype)).clamp(-2, 2)
    error = error.masked_fill(exact == 0, float("nan"))
    rows = error.reshape(-1, error.shape[-1]).nanmean(1)
    numbers, rows = error[~error.isnan()], rows[~rows.isnan()]
    if len(numbers) >= 32:
        chance = max(
            5 * samples.std().item() / len(samples) ** 0.5 for samples in (numbers, rows) if len(samples) > 1
        )
        assert abs(numbers.mean().item()) < 0.05 + chance, (
            f"{what}: errs by {numbers.mean():+.3f} ulp on average"
        )


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the distance of each number to the next larger one of a dtype, in float64."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.frexp(x.double()).exponent - 1.0).clamp_min(info.tiny) * info.eps


def bound(check: str, level: str) -> float:
    """Returns the bound of a check at a CPU level; if the table lacks it, the check's loosest bound of other levels."""
    of_levels = {name: pair for name, pair in table.get(check, {}).items() if name != "reason"}
    if level in of_levels:
        return float(of_levels[level][0])
    return float(max((pair[0] for pair in of_levels.values()), default=USUAL))


def renewed(old: dict[str, dict[str, Any]], seen: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Returns the table renewed by what was seen: bounds are `MARGIN` times that, never looser than before. Checks that
    were not seen are dropped; levels that this CPU lacks stay.

    Raises ValueError for a check that errs more than its bound."""
    new: dict[str, dict[str, Any]] = {}
    for check, of_levels in sorted(seen.items()):
        new[check] = dict(old.get(check, {}))
        for level, ratio in sorted(of_levels.items()):
            before = float(new[check].get(level, [USUAL])[0])
            if ratio > before:
                raise ValueError(
                    f"{check} at {level}: {ratio:.3g} is more than {before:g}, which is not loosened"
                )
            new[check][level] = [min(before, _short(MARGIN * ratio)), _short(ratio)]
    return new


def renewing() -> bool:
    return "HEADWAY_RENEW_TOLERANCES" in os.environ


def _short(x: float) -> float:
    return float(f"{x:.2g}")


def _level() -> str:
    """Returns the CPU level of bounds: a level built on another gives the same bits (test_levels.py) and shares it."""
    library = loader.search().library
    return build.STANDS_ON.get(library.level, library.level) if library else "none"


def _test(dtype: torch.dtype) -> str:
    name = os.environ["PYTEST_CURRENT_TEST"].removeprefix("tests/").partition("[")[0].partition(" ")[0]
    return f"{name} {str(dtype)[6:]}"


def main() -> int:
    """Runs all tests that make checks, slow ones too, and renews the table if all pass."""
    from tests import tolerance  # the module that tests import; this one is `__main__`

    os.environ["HEADWAY_RENEW_TOLERANCES"] = "1"
    makes_checks = re.compile(r"from tests\.(tolerance|native\.plain|test_orthogonality) import")
    this_test = TABLE.with_name("test_tolerance.py")
    tests = sorted(set(TABLE.parent.rglob("test_*.py")) - {this_test})
    files = [str(path) for path in tests if makes_checks.search(path.read_text())]
    if code := pytest.main(["-q", "-p", "no:cacheprovider", "--slow", *files]):
        return int(code)
    lines = (f'"{check}": {json.dumps(row)}' for check, row in renewed(table, tolerance.worst).items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
