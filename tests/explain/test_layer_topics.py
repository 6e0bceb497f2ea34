"""The topics of what surrounds attention (rows 17, 22 to 24, 27, 32, 104), and that their verdicts can differ."""

import math
from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from headway.models import ModelSpec, cost
from headway.patterns import Causal, Window
from headway.patterns.count import span
from headway.positions import Sinusoidal
from headway_lab.explain import (
    complexity,
    judged,
    multi_head,
    norms,
    receptive_field,
    residual_order,
    sinusoids,
    swish,
)
from headway_lab.explain.report import Report, Row

MODULES = (multi_head, complexity, receptive_field, norms, residual_order, sinusoids, swish)


@pytest.mark.parametrize(
    "module",
    [pytest.param(multi_head, marks=pytest.mark.slow), *MODULES[1:]],
    ids=lambda m: m.__name__,
)
def test_every_topic_is_seen(module: ModuleType, reports: Mapping[ModuleType, Report]) -> None:
    assert reports[module].seen, reports[module].verdict


@pytest.mark.slow
@pytest.mark.parametrize("module", [multi_head, residual_order], ids=lambda m: m.__name__)
def test_the_larger_topics_are_seen_at_their_own_size(module: ModuleType) -> None:
    report = judged(module)
    assert report.seen, report.verdict
    assert report == judged(module), "the same seeds must give the same report"


# -- norms and their place ---------------------------------------------------------------------------------


def test_row_23_each_norm_is_normal_over_its_own_axes(reports: Mapping[ModuleType, Report]) -> None:
    """Row 23."""
    batch, layer, rms = reports[norms].rows

    def moments(row: Row, over: str) -> tuple[float, float]:
        return row[f"|mean|, {over}"], row[f"|var - 1|, {over}"]

    assert max(moments(batch, "batch")) < 1e-9 < 0.05 < min(moments(batch, "features"))
    assert max(moments(layer, "features")) < 1e-9 < 0.05 < min(moments(layer, "batch"))
    assert layer["change: other rows"] == rms["change: other rows"] == 0, "no row sees another"
    assert batch["change: other rows"] > 0.05
    assert rms["change: x + 1"] > 0.05, "not invariant to re-centring"


def test_norms_would_notice_rows_that_see_one_another(reports: Mapping[ModuleType, Report]) -> None:
    batch, layer, rms = reports[norms].rows
    assert norms.judge([batch, layer, rms]).seen
    assert not norms.judge([batch, {**layer, "change: other rows": 1e-3}, rms]).seen
    assert not norms.judge([layer, layer, rms]).seen


def test_dividing_by_the_variance_is_not_normal() -> None:
    """E13: dividing by the variance instead of its root does not give variance 1."""
    x = 3 * torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(((x - x.mean()) / x.std()).var()) == pytest.approx(1, rel=1e-9)
    assert float(((x - x.mean()) / x.var()).var()) == pytest.approx(1 / float(x.var()), rel=1e-9)


def test_row_27_both_orders_are_their_formulas(reports: Mapping[ModuleType, Report]) -> None:
    """Row 27."""
    assert set(reports[residual_order].column("from the formula")) == {0.0}
    first, second = (residual_order.stack(2, order, 0) for order in residual_order.ORDERS)
    for a, b in zip(first[0], second[0], strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    with torch.no_grad():
        assert float((first[0][0](first[1]) - second[0][0](second[1])).abs().max()) > 0.1


def test_row_27_depth_shows_in_the_gradient_of_one_order_only(reports: Mapping[ModuleType, Report]) -> None:
    """Row 27."""
    rows = reports[residual_order].rows
    swapped = [{**row, "order": {"pre": "post", "post": "pre"}[row["order"]]} for row in rows]
    assert residual_order.judge(rows).seen
    report = residual_order.judge(swapped)
    assert [report.claims[claim] for claim in ("pre", "post", "differ")] == [False] * 3
    noisy = [
        {**row, "|dL/dW|, last layer": row["|dL/dW|, last layer"] * (1 + row["seed"] * row["layers L"])}
        for row in rows
    ]
    assert not residual_order.judge(noisy).seen, "seeds that disagree show nothing"
    vanishing = [{**row, "|dL/dW|, first layer": 1e-3} for row in rows]
    assert not residual_order.judge(vanishing).seen


# -- Swish, sinusoids --------------------------------------------------------------------------------------


def test_row_32_swish_has_the_golden_values(reports: Mapping[ModuleType, Report]) -> None:
    """Row 32 and E16: Swish_0(2) = 1, Swish_100(-1) about 0."""
    report = reports[swish]
    value = {row["beta"]: row for row in report.rows}
    assert value[0.0]["Swish(2)"] == 1.0
    assert abs(value[100.0]["Swish(-1)"]) < 1e-40
    assert value[1.0]["lowest at x"] == pytest.approx(-1.2784645, abs=0.006), "the grid's step is 0.01"
    assert value[1.0]["lowest"] == pytest.approx(-0.2784645, abs=1e-4)
    assert report.column("falls and rises") == [False, False, True, True, True]
    for row in report.rows[1:]:
        assert row["from ReLU"] <= 0.27847 / row["beta"] + 1e-3
    wrong = {**report.rows[0], "Swish(-1)": -1.0, "Swish(2)": 2.0, "from x/2": 3.0, "from x": 0.0}
    assert not swish.judge([wrong, *report.rows[1:]]).seen, "at beta = 0 it is not x"


def test_row_22_a_sinusoid_is_moved_by_one_matrix(reports: Mapping[ModuleType, Report]) -> None:
    """Row 22, with a matrix that is fitted to the rows instead of the formula's."""
    table = Sinusoidal().embedding(torch.arange(600), 16, torch.float64)
    fit = torch.linalg.lstsq(table[:-37], table[37:]).solution
    assert float((table[:-37] @ fit - table[37:]).abs().max()) < 1e-9
    report = reports[sinusoids]
    product = dict(zip(report.column("k"), report.column("PE(p).PE(p+k) / (M/2)"), strict=True))
    assert product[1] == pytest.approx(
        sum(math.cos(10000 ** (-2 * i / 512)) for i in range(256)) / 256, abs=1e-12
    )
    assert "|PE(p)| = 16.000" in report.picture
    assert "22.627" in report.picture
    first, *rest = report.rows
    assert not sinusoids.judge([{**first, "|PE(p+k) - T_k PE(p)|": 1e-3}, *rest], 0.0).seen
    assert not sinusoids.judge(report.rows, 1e-3).seen


# -- complexity, fields, heads -----------------------------------------------------------------------------


NEAR = 8


def test_row_24_operations_grow_as_the_table_says(reports: Mapping[ModuleType, Report]) -> None:
    """Row 24: n^2 d, n d^2, k n d^2, r n d, counted while the layers run."""
    count = {(row["layer"], row["n"], row["d"]): row["multiply-adds"] for row in reports[complexity].rows}
    doubled = {
        "self-attention": (4, 2),
        "recurrent": (2, 4),
        "convolution": (2, 4),
        "convolution, dilated": (2, 4),
        "restricted attention": (2, 2),
    }
    for name, (with_n, with_d) in doubled.items():
        assert count[name, 64, 32] == with_n * count[name, 32, 32]
        assert count[name, 32, 32] == with_d * count[name, 32, 16]


def test_row_24_paths_and_chains_are_found_by_reachability(reports: Mapping[ModuleType, Report]) -> None:
    """Row 24. Path: the fewest layers until all earlier tokens are reached; chain: products that wait for one
    another."""
    rows = reports[complexity].rows
    by_layer = {row["layer"]: row for row in rows if (row["n"], row["d"]) == (64, 32)}
    assert {name: (row["path"], row["products in a chain"]) for name, row in by_layer.items()} == {
        "self-attention": (1, 2),
        "recurrent": (63, 64),
        "convolution": (32, 1),
        "convolution, dilated": (4, 1),
        "restricted attention": (9, 2),
    }
    for column in ("path", "multiply-adds", "products in a chain"):
        assert not complexity.judge([{**rows[0], column: 9}, *rows[1:]]).seen, column


@pytest.mark.parametrize(("n", "k", "r"), [(8, 2, 2), (20, 4, 3), (27, 3, 27), (28, 3, 5)])
def test_row_24_any_kernel_and_window_has_its_path(n: int, k: int, r: int) -> None:
    for _, step, sizes in complexity.layers_of(k, r).values():
        assert complexity.hops(step, n, k) == sizes(n, 4)[2]


def test_a_chain_is_as_long_as_the_products_that_wait() -> None:
    """Three products wait for one another, beside five that do not."""

    def layer(x: torch.Tensor, w: list[torch.Tensor], depth: int) -> torch.Tensor:
        side = sum(x @ w[0] for _ in range(5))
        return torch.as_tensor(side + ((x @ w[0]).tanh() @ w[1]) @ w[0])

    assert complexity.chain(layer, 5, 2) == 3


def test_the_layers_of_the_table_are_the_layers_they_are_called() -> None:
    x, w = complexity._inputs(12, 8, 3)
    full = complexity.attention(x, w, 0)
    near = complexity.restricted(x, w, 0, NEAR)
    torch.testing.assert_close(near[:NEAR], full[:NEAR], rtol=0, atol=1e-12)
    assert float((near[NEAR:] - full[NEAR:]).abs().max()) > 1e-3
    state = torch.zeros(8, dtype=torch.float64)
    for token, output in zip(x, complexity.recurrent(x, w, 0), strict=True):
        state = torch.tanh(state @ w[0] + token @ w[1])
        torch.testing.assert_close(output, state, rtol=0, atol=1e-12)


def test_row_104_fields_are_predicted_for_any_stack(reports: Mapping[ModuleType, Report]) -> None:
    """Row 104."""
    report = reports[receptive_field]
    assert set(report.column("differing pairs")) == {0}
    assert report.column("tokens, by gradient") == report.column("tokens, predicted")
    assert report.column("tokens, by gradient")[0] == 13, "4 layers of 3 others, and the token itself"
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        before, after, step = torch.randint(0, 4, (3, 3), generator=generator).tolist()
        stack = [Window(b, a, s + 1) for b, a, s in zip(before, after, step, strict=True)]
        assert torch.equal(receptive_field.predicted(stack), receptive_field.measured(stack))


def test_row_104_the_topic_s_span_is_the_receptive_field_of_a_spec(
    reports: Mapping[ModuleType, Report],
) -> None:
    stack = (Window.last(4), Window.last(3, step=2), Window.last(2))
    spec = ModelSpec.of("llama", vocab=16, width=16, layers=3, heads=2, hidden=16, patterns=stack)
    (row,) = (row for row in reports[receptive_field].rows if row["stack"] == "two-sided, then causal")
    assert span(stack) == cost.receptive_field(spec) == 1 + 3 + 4 + 1
    assert span((*stack, Causal())) is None
    assert row["span, predicted"] == row["span, by gradient"] == 1 + (3 + 3) + 5, "both sides count"


def test_a_field_that_differs_is_not_seen(reports: Mapping[ModuleType, Report]) -> None:
    first, *rest = reports[receptive_field].rows
    assert not receptive_field.judge([{**first, "differing pairs": 1}, *rest]).seen
    assert not receptive_field.judge([{**first, "span, by gradient": 12}, *rest]).seen


@pytest.mark.slow
def test_row_17_more_heads_name_more_tokens_with_as_many_parameters(
    reports: Mapping[ModuleType, Report],
) -> None:
    """Row 17."""
    report = reports[multi_head]
    for seed in (0, 1):
        right = {row["heads"]: row["right"] for row in report.rows if row["seed"] == seed}
        assert right[1] < right[2] < right[4]
    assert len(set(report.column("parameters"))) == 1
    assert sorted(report.rows[-1]["heads look back"].split(), key=int) == ["1", "3", "6", "10"]
    invented = [{**row, "right": row["heads"] / 4.1} for row in report.rows]
    assert multi_head.judge(invented).seen
    assert not multi_head.judge([{**row, "right": 0.95} for row in invented]).seen
    assert not multi_head.judge([{**row, "parameters": row["heads"]} for row in invented]).seen
    assert not multi_head.judge([{**row, "places": 3} for row in invented]).seen
