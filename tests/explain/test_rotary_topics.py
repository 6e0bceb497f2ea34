"""The topics of the rotary rows (54 to 60, 64 to 68, 70 to 73, 79): golden numbers, and verdicts that can differ."""

import math
import re
from collections.abc import Mapping
from types import ModuleType

import pytest
import torch

from headway.attention.linear_attention import LinearAttentionSpec, linear_weights
from headway.positions import Rotary
from headway_lab.explain import (
    judged,
    offset_task,
    rotary_decay,
    rotary_expansion,
    rotary_forms,
    rotary_frequencies,
    rotary_identity,
    rotary_linear,
    rotary_shift,
    rotary_values,
)
from headway_lab.explain.report import Report
from headway_lab.explain.rotary_decay import bound, decay
from headway_lab.explain.rotary_forms import angles
from headway_lab.explain.spread import Gap
from tests.explain.toys import lost
from tests.positions.test_schemes import GOLDEN, product

TRAINED = (rotary_frequencies, rotary_values)
TOO_SMALL = {
    rotary_forms: "ready-made matrices take more time than the elementwise form",
    rotary_frequencies: "with equal angles the task is learned worse than with any others",
    rotary_values: "what is learned with them is lost where positions are moved",
}
"""The claims that toy size does not show: time, by a clock of equal steps, and what is learned in 10 steps. They are
judged at the topics' own size, or on invented numbers."""
MODULES = (
    rotary_decay,
    rotary_expansion,
    rotary_forms,
    rotary_frequencies,
    rotary_identity,
    rotary_linear,
    rotary_shift,
    rotary_values,
)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_topic_is_seen(module: ModuleType, reports: Mapping[ModuleType, Report]) -> None:
    assert set(lost(reports[module])) <= {TOO_SMALL.get(module)}, reports[module].verdict


@pytest.mark.slow
@pytest.mark.parametrize("module", [rotary_decay, *TRAINED], ids=lambda m: m.__name__)
def test_the_larger_topics_are_seen_at_their_own_size(module: ModuleType) -> None:
    report = judged(module)
    assert report.seen, report.verdict
    assert report == judged(module), "the same seeds must give the same report"


# -- identity and forms ------------------------------------------------------------------------------------


def test_every_law_of_the_derivation_holds(reports: Mapping[ModuleType, Report]) -> None:
    """Rows 54, 56 to 60, and 113: absolute and relative."""
    report = reports[rotary_identity]
    assert all(report.column("holds"))
    exact = dict(zip(report.column("law"), report.column("largest difference"), strict=True))
    assert exact["f(q, 0) = q"] == 0
    assert exact["theta_i, i from 0 or from 1"] == 0
    assert "relative: a score depends on m - n alone" in report.verdict


def test_a_broken_law_or_one_vector_for_two_positions_is_not_seen(
    reports: Mapping[ModuleType, Report],
) -> None:
    laws = reports[rotary_identity].rows
    broken = rotary_identity.judge([{**laws[0], "largest difference": 1e-6}, *laws[1:]], 0.3)
    assert not broken.seen
    assert not broken.claims["law", "f(q, 0) = q"]
    assert not rotary_identity.judge(laws, 0.0).seen


def test_phase_steps_are_the_frequencies() -> None:
    """Row 56: phi(m) is an arithmetic progression; the nearest position has the smallest |q - R_k q|."""
    steps = rotary_identity.steps()
    assert float(rotary_identity.wrapped(steps - steps[0]).abs().max()) < rotary_identity.ALLOWED
    assert float(rotary_identity.wrapped(torch.tensor(2 * math.pi + 0.1))) == pytest.approx(0.1, abs=1e-6)
    unit = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(32)
    far = torch.arange(1, rotary_identity.FARTHEST)[:, None] * Rotary(pairing="adjacent").frequencies(64)
    closed = (2 - 2 * far.cos()).mean(-1).sqrt().min()
    assert rotary_identity.nearest(unit) == pytest.approx(float(closed), rel=1e-9)


def test_forms_agree_and_angles_have_half_a_head(reports: Mapping[ModuleType, Report]) -> None:
    """Rows 55 and 60 (E7: [tokens, D/2], D of one head)."""
    report = reports[rotary_forms]
    assert max(report.column("difference from R_m")) <= 1e-12
    assert report.column("products / vector") == [128**2] * 2 + [256] * 6
    assert angles(torch.arange(5), 64).shape == (5, 32)
    rows = list(report.rows)
    slower = Gap(1.0, 0.1)
    assert rotary_forms.judge(rows, slower).seen
    assert not rotary_forms.judge(
        [*rows[:3], {**rows[3], "difference from R_m": 1e-3}, *rows[4:]], slower
    ).seen
    assert not rotary_forms.judge(rows, Gap(0.1, 0.2)).seen, "time is judged with its spread"


# -- expansion, decay, frequencies -------------------------------------------------------------------------


def test_row_72_expansion_prints_the_golden_numbers(reports: Mapping[ModuleType, Report]) -> None:
    """Row 72 and E10: 1.0612 = 1.0612, and 1.2307 with the printed sign."""
    report = reports[rotary_expansion]
    assert report.picture.splitlines()[1] == (
        "score 1.0612   with sin(m - n) 1.0612   with sin(n - m), as printed 1.2307"
    )
    for row in report.rows:
        assert row["score"] == pytest.approx(row["sin(m - n)"], abs=1e-12)
        assert (abs(row["sin(n - m), printed"] - row["score"]) < 1e-12) == (row["D = m - n"] == 0)


def test_half_and_half_is_a_cosine_that_rises_again(reports: Mapping[ModuleType, Report]) -> None:
    """Row 73."""
    report = reports[rotary_expansion]
    for d, value in zip(report.column("D = m - n"), report.column("q = [1/2, 1/2], k = [1, 1]"), strict=True):
        assert value == pytest.approx(math.cos(d), abs=1e-12)
    assert "rises at 6 of 12 distances" in report.verdict
    q, k = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0])
    assert rotary_expansion.expansion(q, k, 1.0)[0] == rotary_expansion.expansion(q, k, 1.0)[1]


def test_expansion_is_not_seen_with_the_printed_sign(reports: Mapping[ModuleType, Report]) -> None:
    right, printed = "sin(m - n)", "sin(n - m), printed"
    rows = reports[rotary_expansion].rows
    swapped = [{**row, right: row[printed], printed: row[right]} for row in rows]
    assert not rotary_expansion.judge(swapped).seen


def test_decay_prints_the_golden_numbers_to_their_digits(reports: Mapping[ModuleType, Report]) -> None:
    """Rows 65 and 67."""
    report = reports[rotary_decay]
    values = {f"f({m})": digits for m, digits in re.findall(r"f\((\d+) *\) = +([\d.]+)", report.picture)}
    assert values["f(0)"] == "32.500000"
    for m, value in GOLDEN.items():
        assert values[f"f({m})"] == f"{value:.6f}"
    assert "rises at 115 of 256 steps and is lowest at m = 236" in report.verdict


def test_row_66_decay_measures_what_the_bound_bounds() -> None:
    """Row 66: the modulus itself stays below the bound, and no score is larger than the modulus."""
    noise = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 500, 1, 1, 128, generator=noise, dtype=torch.float64)
    rotary, m = Rotary(pairing="adjacent"), torch.tensor([0, 1, 17, 256])
    frequencies = rotary.frequencies(128)
    modulus = product(q[:, 0], k[:, 0], -m, frequencies)
    assert (rotary_decay.scores(rotary, q, k, m).abs() <= modulus + 1e-9).all()
    assert (modulus <= bound(q[:, 0], k[:, 0], m, frequencies)).all()


def test_schedules_have_the_golden_ends(reports: Mapping[ModuleType, Report]) -> None:
    """Row 68: 0.70, 5.5, 6.8 at 256, and 32.5 at every distance when all are equal."""
    report = reports[rotary_frequencies]
    end = dict(zip(report.column("frequencies"), report.column("f(256)"), strict=True))
    assert end["powers"] == pytest.approx(6.543097, abs=5e-7)
    assert end["linear"] == pytest.approx(0.70, abs=0.005)
    assert end["quadratic"] == pytest.approx(5.5, abs=0.05)
    assert end["cosine"] == pytest.approx(6.8, abs=0.05)
    for name in ("equal", "equal, 1/base"):
        flat = decay(torch.arange(257), rotary_frequencies.schedules(128)[name].frequencies(128))
        assert torch.allclose(flat, torch.full_like(flat, 32.5), rtol=1e-12, atol=0)


def test_row_71_one_angle_gives_two_curves_and_different_angles_give_more() -> None:
    """Row 71: cos(m theta) and sin(m theta) for every different theta."""
    assert rotary_frequencies.rank(torch.full((64,), 0.7)) == 2
    two = torch.tensor([0.7, 0.2]).repeat(32)
    assert rotary_frequencies.rank(two) == 4


def test_equal_angles_must_be_learned_worse(reports: Mapping[ModuleType, Report]) -> None:
    rows = list(reports[rotary_frequencies].rows)
    claim = "learned"
    good = [{**row, "seed 0": 0.9, "seed 1": 0.91} for row in rows[:-2]]
    worse = [{**row, "seed 0": 0.5, "seed 1": 0.51} for row in rows[-2:]]
    assert rotary_frequencies.judge([*good, *worse]).claims[claim]
    assert not rotary_frequencies.judge([*good, worse[0], {**worse[1], "seed 1": 0.92}]).claims[claim]
    flat = {**rows[0], **{f"f({m})": 32.5 for m in rotary_frequencies.SHOWN}}
    assert not rotary_frequencies.judge([flat, *rows[1:]]).seen


# -- values, shift, linear attention -----------------------------------------------------------------------


def test_turned_values_are_turned_as_a_whole_by_a_shift(reports: Mapping[ModuleType, Report]) -> None:
    """Row 70: out(s) = R_s out; plain values, and values turned back at the query, do not change."""
    plain, turned, back = reports[rotary_values].rows
    assert max(*rotary_values.changes(plain), *rotary_values.changes(back)) < 1e-12
    assert turned["from R_s out"] < 1e-12
    good, bad = {"seed 0": 1.0, "seed 1": 1.0}, {"seed 0": 0.4, "seed 1": 0.41}
    plain, turned, back = {**plain, **good}, {**turned, **bad}, {**back, **good}
    assert rotary_values.judge([plain, turned, back]).seen
    assert not rotary_values.judge([plain, {**plain, **bad, "from R_s out": 0.0}, back]).seen
    assert not rotary_values.judge([plain, {**turned, **good}, back]).seen


def test_values_turned_and_back_are_the_sum_of_relative_turns() -> None:
    noise = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 1, 6, 8, generator=noise, dtype=torch.float64)
    position = torch.arange(3, 9)
    rotary = Rotary(pairing="adjacent")
    scores = (rotary.rotate(q, position) @ rotary.rotate(k, position).mT)[0, 0] / 8**0.5
    weights = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    out = rotary_values.layer(q, k, v, position, "turned and back")
    for m in range(6):
        turned = rotary.rotate(v, torch.arange(6) - m)[0, 0]
        torch.testing.assert_close(out[0, 0, m], weights[m] @ turned, rtol=0, atol=1e-12)


def test_row_79_some_products_are_negative(reports: Mapping[ModuleType, Report]) -> None:
    """Row 79: elu + 1, d = 64."""
    assert int((rotary_linear.products(*rotary_linear.pairs(0)) < 0).sum()) == 37
    assert reports[rotary_linear].finding.startswith("37, ")
    q, k, _ = rotary_linear.pairs(0)
    assert (rotary_linear.products(q, k, torch.zeros(300, dtype=torch.int64)) > 0).all(), (
        "unturned: all positive"
    )


def test_only_the_turned_denominator_blows_up(reports: Mapping[ModuleType, Report]) -> None:
    rows = list(reports[rotary_linear].rows)
    of_seed_0 = [row for row in rows if row["seed"] == 0]
    plain, both, above, cosine = of_seed_0
    assert both["largest |out| / |v|"] > 100
    assert above["off from sum 1"] > 0.1, "no distribution"
    assert above["largest |out| / |v|"] <= 2
    assert cosine["negative weights"] == plain["negative weights"] == 0
    assert cosine["off from sum 1"] < 1e-12
    assert rotary_linear.judge({0: 37, 1: 30}, rows).seen
    assert not rotary_linear.judge({0: 0, 1: 30}, rows).seen
    calm = [{**row, "largest |out| / |v|": 1.0} if row["seed"] == 1 else row for row in rows]
    assert not rotary_linear.judge({0: 37, 1: 30}, calm).seen, "every seed must blow up"


@pytest.mark.parametrize(
    ("form", "linear"),
    [
        ("turned above and below", LinearAttentionSpec(rotary="both")),
        ("turned above only", LinearAttentionSpec(rotary="numerator")),
        ("1 + cosine, turned", LinearAttentionSpec("cosine")),
    ],
)
def test_the_topics_own_formulas_are_those_of_the_engine(form: str, linear: LinearAttentionSpec) -> None:
    noise = torch.Generator().manual_seed(7)
    q, k = torch.randn(2, 20, 1, 2, 64, generator=noise, dtype=torch.float64)
    position = torch.randint(0, 2048, (20, 2), generator=noise)
    table = Rotary(pairing="adjacent").rotation(position, 64, dtype=torch.float64)
    expected = linear_weights(q, k, linear, rotation=table)[:, 0, 1]
    apart = [position[:, 1] - position[:, j] for j in range(2)]
    actual, _ = rotary_linear.weigh(form, q[:, 0, 1], [k[:, 0, j] for j in range(2)], apart)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# -- the task ----------------------------------------------------------------------------------------------


def test_the_offset_task_leaves_the_global_generator_alone_and_repeats() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (offset_task.train(Rotary(pairing="adjacent"), (2,), steps=3, seed=1) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert first.losses == second.losses
    assert first.accuracy() == second.accuracy() < 0.5
    assert first.layer.weights(offset_task.sample(1, torch.Generator())).shape == (1, 1, 48, 48)
