"""Row 64: what a shift of all positions leaves, by its topic, and its stack of layers by hand."""

from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from headway.attention import attend
from headway.patterns import Causal
from headway_lab.explain import (
    rotary_shift,
)
from headway_lab.explain.report import Report


def test_row_64_a_shift_leaves_rounding_only_while_angles_are_exact(
    reports: Mapping[ModuleType, Report],
) -> None:
    """Row 64."""
    report = reports[rotary_shift]
    change = {(row["numbers"], row["angles"]): row for row in report.rows}
    assert {name for name, _ in change} == {"float64", "float32", "bfloat16", "float16"}
    for name in ("float32", "bfloat16", "float16"):
        exact, eps = (change[name, "float64"][column] for column in ("s = 1000", "eps"))
        assert exact < 20 * eps, name
        assert change[name, name]["s = 1000"] > 4 * exact
    assert change["float16", "float16"]["s = 100000"] is None, "100000 is beyond float16"
    assert report.to_json()["rows"][-1][-1] is None
    rows = [row if row["angles"] != "bfloat16" else {**row, "s = 1000": 1e-3} for row in report.rows]
    assert not rotary_shift.judge(rows).seen


@pytest.mark.parametrize("seed", [0, 3])
def test_row_64_the_stack_of_the_shift_is_the_engine(seed: int) -> None:
    """The oracle is built layer by layer with `attend` and `Rotary` from the same weights."""
    heads, width = rotary_shift.HEADS, rotary_shift.HEADS * rotary_shift.HEAD_DIM
    here = torch.arange(5, 5 + rotary_shift.TOKENS)
    noise = torch.Generator().manual_seed(seed)
    start = torch.randn(1, rotary_shift.TOKENS, width, generator=noise, dtype=torch.float64)
    weights = torch.randn(rotary_shift.LAYERS, 4, width, width, generator=noise, dtype=torch.float64)
    x = start
    for to_q, to_k, to_v, to_out in weights * width**-0.5:
        q, k, v = ((x @ w).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (to_q, to_k, to_v))
        rotary = rotary_shift.ROTARY
        out = attend(rotary.rotate(q, here), rotary.rotate(k, here), v, Causal())
        x = x + out.transpose(1, 2).flatten(2) @ to_out
    actual = rotary_shift.stack(here, torch.float64, "float64", seed)
    torch.testing.assert_close(actual, x[0], rtol=0, atol=1e-12)
    assert float((actual - start[0]).abs().max()) > 0.1, "the layers do something"
    narrow = rotary_shift.stack(here, torch.float32, "float64", seed)
    assert float((narrow - actual).abs().max()) < 1e-4


def test_row_64_the_growth_of_float32_angles_is_measured(reports: Mapping[ModuleType, Report]) -> None:
    rows = reports[rotary_shift].rows
    still = [
        row if row["angles"] != "float32" else {**row, "s = 10000": 1e-5, "s = 100000": 1e-5} for row in rows
    ]
    assert not rotary_shift.judge(still).seen
