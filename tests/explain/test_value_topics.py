"""The topics of sink logits, gates, delta-rule states, norm orders and experts, and that their verdicts can differ."""

from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from headway.models import cost
from headway_lab.explain import delta, experts, gates, norm_orders, sink_logit
from headway_lab.explain.report import Report
from headway_lab.profiling import normal
from tests.command_lines import ROOT
from tests.explain.toys import lost

MODULES = (sink_logit, gates, delta, norm_orders, experts)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_they_are_seen(module: ModuleType, reports: Mapping[ModuleType, Report]) -> None:
    assert reports[module].seen, reports[module].verdict


@pytest.mark.parametrize(
    ("module", "column", "value", "claim"),
    [
        (sink_logit, "from sigmoid(lse - s)", 1e-9, "sum"),
        (sink_logit, "from n / (n + e^s)", 1e-9, "sum"),
        (sink_logit, "from dense", 1e-9, "dense"),
        (sink_logit, "merged from whole", 1e-9, "merged"),
        (sink_logit, "a sink each", 1e-9, "once"),
        (sink_logit, "gradient of s", 1e-9, "gradients"),
        (sink_logit, "sum, none matches", 0.5, "nothing"),
        (sink_logit, "sum, a key matches", 0.5, "nothing"),
        (gates, "from the formula", 1e-9, "formula"),
        (gates, "parameters", 9, "sizes"),
        (gates, "0 from the factor", 1e-9, "zero"),
        (gates, "a shut gate leaves", 1e-9, "shut"),
        (gates, "others move", 1e-9, "alone"),
        (gates, "off from linear", 1e-9, "linear"),
        (experts, "from the loop", 1e-9, "loop"),
        (experts, "weights off 1", 1e-9, "loop"),
        (experts, "idle gradient", 1e-9, "gradients"),
        (experts, "busy gradient", 0.0, "gradients"),
        (experts, "experts read", 9.0, "batch"),
    ],
)
def test_a_number_that_is_wrong_loses_its_claim(
    module: ModuleType, column: str, value: float, claim: str, reports: Mapping[ModuleType, Report]
) -> None:
    rows = reports[module].rows
    skipped = {"a sink each": lambda row: row["s"] < 0, "sum, ": lambda row: row is not rows[-1]}
    for worst, row in enumerate(rows):
        if column in row and not any(column.startswith(n) and skips(row) for n, skips in skipped.items()):
            changed = [{**other, column: value} if i == worst else other for i, other in enumerate(rows)]
            assert claim in lost(module.judge(changed))


def test_a_sink_is_a_gate_of_the_heads_own_scores() -> None:
    q, k, v = (normal(1, 2, 5, 8, seed=i) for i in range(3))
    sink = torch.tensor([-1.0, 2.0], dtype=q.dtype)
    scores = q @ k.mT * 8**-0.5
    gate = torch.sigmoid(scores.logsumexp(-1) - sink[:, None])
    expected = gate[..., None] * (scores.softmax(-1) @ v)
    torch.testing.assert_close(
        expected, torch.as_tensor(sink_logit.attend(q, k, v, sink_logit=sink)), rtol=0, atol=1e-12
    )


def test_keys_that_come_again_are_overwritten_added_or_averaged(reports: Mapping[ModuleType, Report]) -> None:
    """The errors for orthogonal keys: 0 (delta), |old|^2 / |new|^2 (sums), |old - new|^2 / 4 |new|^2 (softmax)."""
    by_kind = {(row["kind"], row["pairs"]): row for row in reports[delta].rows}
    for pairs in (4, 8, 16):
        pairs_of = [normal(2, pairs, delta.WIDTH, seed=seed + 20) for seed in delta.SEEDS]
        added = [float(old.square().sum() / new.square().sum()) for old, new in pairs_of]
        mean = [float((old - new).square().sum() / new.square().sum() / 4) for old, new in pairs_of]
        assert by_kind["delta", pairs]["wrong, anew"] < 1e-20
        assert by_kind["sums", pairs]["wrong, anew"] == pytest.approx(sum(added) / len(added), rel=1e-9)
        assert by_kind["softmax", pairs]["wrong, anew"] == pytest.approx(sum(mean) / len(mean), rel=1e-6)


def test_a_state_holds_the_last_keys_that_fit(reports: Mapping[ModuleType, Report]) -> None:
    """64 keys in four frames of 16: the last frame is read exactly, of the other frames wrong values are read."""
    k, v = delta.frames(64, 0), normal(64, delta.WIDTH, seed=1)
    read = delta.KINDS["delta"](k, k, v)
    torch.testing.assert_close(read[48:], v[48:], rtol=0, atol=1e-10)
    wrong = (read - v).square().sum(-1) / v.square().sum(-1)
    assert float(wrong[:48].min()) > 0.1
    (row,) = [row for row in reports[delta].rows if (row["kind"], row["pairs"]) == ("delta", 64)]
    assert row["numbers kept"] == delta.WIDTH**2


def test_the_page_on_linear_attention_has_the_numbers_of_the_run(
    reports: Mapping[ModuleType, Report],
) -> None:
    """docs/linear.md has the least and the largest error of repeated keys that fit, and the error of 64 pairs."""
    table = (ROOT / "docs" / "linear.md").read_text(encoding="utf-8").partition("n ≤ 16, once")[2]
    lines = {line.split()[1].rstrip(","): line for line in table.splitlines() if line.startswith("| ")}
    for kind in ("sums", "softmax"):
        rows = [row for row in reports[delta].rows if row["kind"] == kind]
        again = [row["wrong, anew"] for row in rows if row["pairs"] <= delta.WIDTH]
        assert f"| 0 | {min(again):.2g} to {max(again):.2g}: " in lines[kind]
        assert f"| {rows[-1]['wrong']:.1f} |" in lines[kind].replace("| 0 |", "| 0.0 |")
    (lost_most,) = [row for row in reports[delta].rows if (row["kind"], row["pairs"]) == ("delta", 64)]
    assert f"| 0 | 0: the old value is taken away first | {lost_most['wrong']:.1f}: " in lines["delta"]


@pytest.mark.parametrize(
    ("name", "claim"),
    [("forms", "forms"), ("rows", "rows"), ("products", "rows"), ("decay", "decay"), ("negative", "signs")],
)
def test_a_formula_of_the_rule_that_fails_is_noticed(
    name: str, claim: str, reports: Mapping[ModuleType, Report]
) -> None:
    exact = dict.fromkeys(("forms", "rows", "products", "decay"), 0.0) | {"negative": -0.4}
    rows = reports[delta].rows
    assert delta.judge(exact, rows).seen
    assert lost(delta.judge({**exact, name: 0.01}, rows)) == [claim]


@pytest.mark.parametrize(
    ("order", "column", "factor", "claim"),
    [
        ("post", "|x_L| / |x_0|", 1.2, "post"),
        ("post", "with large weights", 1.2, "post"),
        ("sandwich", "with large weights", 1.2, "added"),
        ("output", "|x_L| / |x_0|", 0.8, "added"),
        ("pre", "with large weights", 0.3, "weights"),
        ("pre, scaled", "|x_L| / |x_0|", 2.0, "scaled"),
    ],
)
def test_a_stream_of_another_size_loses_its_claim(
    order: str, column: str, factor: float, claim: str, reports: Mapping[ModuleType, Report]
) -> None:
    rows = reports[norm_orders].rows
    deepest = max(i for i, row in enumerate(rows) if row["norms"] == order)
    changed = [{**row, column: row[column] * factor} if i == deepest else row for i, row in enumerate(rows)]
    assert lost(norm_orders.judge(changed)) == [claim]


def test_the_parameters_of_a_token_are_counted_from_the_layers() -> None:
    built = experts.layer_of(0)
    of_one = sum(p.numel() for p in built.experts[0].parameters())
    idle = experts.SPEC.layers * (experts.EXPERTS.count - experts.EXPERTS.top) * of_one
    assert cost.parameter_count(experts.SPEC) - cost.active_parameters(experts.SPEC) == idle
