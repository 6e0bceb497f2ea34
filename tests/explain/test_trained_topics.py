"""Topics that train small models, on invented numbers (rows 30, 32, 33, 62, 68 to 70, 74, 75, 82, 114)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from headway.models import build, cost
from headway.models.difference import differences
from headway.positions import Learned, NoPositions, PerLayer, Rotary, Sinusoidal
from headway_lab.explain import (
    blocks,
    extrapolation,
    linear_training,
    rotary_trained,
    runs,
)
from headway_lab.explain.contests import CONTESTS, gaps, position_schemes, rows
from headway_lab.explain.report import Report, Row
from headway_lab.explain.runs import Budget, small, train
from headway_lab.explain.spread import gap
from tests.explain import toys
from tests.explain.toys import made

TOY = Budget(steps=2, rows=2, seeds=(0, 1))


@pytest.fixture(scope="module", autouse=True)
def toy_size() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        toys.at_toy_size(patch)
        yield


def test_rows_measure_each_contender_against_the_one_that_is_named() -> None:
    results = {"a": made(1.0, 2.0), "b": made(1.5, 2.5), "c": made(1.5, 2.6)}
    table = rows(results, (0, 1))
    assert [line["against"] for line in table] == [None, "a", "b"]
    assert [table[1][name] for name in ("gap", "bound", "seen")] == [0.5, 0.0, True]
    assert gaps(table) == {"b": gap([1.5, 2.5], [1.0, 2.0]), "c": gap([1.5, 2.6], [1.5, 2.5])}
    assert gaps(rows(results, (0, 1), "a"))["c"] == gap([1.5, 2.6], [1.0, 2.0])
    assert [line["against"] for line in rows(results, (0, 1), "b")] == ["b", None, "b"]
    assert [(line["seed 0"], line["seed 1"]) for line in table] == [(1.0, 2.0), (1.5, 2.5), (1.5, 2.6)]


@pytest.mark.parametrize("name", [*CONTESTS, "blocks"])
def test_contenders_of_a_topic_have_equal_sizes_but_for_their_switch(
    name: str, reports: Mapping[str, Report]
) -> None:
    rows = [row for row in reports[name].rows if row["contender"] != blocks.ALONE]
    sizes = [row["parameters"] for row in rows]
    smallest = 0.93 if name == "blocks" else 0.96  # shared keys; tables of positions
    assert min(sizes) > smallest * max(sizes)


def test_row_74_positions_says_rotary_only_when_it_is_lower() -> None:
    """Row 74."""
    low = made(1.00, 1.01, 0.99, 1.00)
    high = made(1.20, 1.22, 1.19, 1.21)
    positions, budget = CONTESTS["positions"], Budget(seeds=(0, 1, 2, 3))
    results = {name: low if name == "rotary" else high for name in positions.schemes}
    assert positions.judge(results, budget).seen
    assert not positions.judge({**results, "learned": low}, budget).seen
    assert not positions.judge({**results, "rotary": made(1.5, 1.5, 1.5, 1.5)}, budget).seen
    assert not positions.judge({**results, "none": made(1.0, 3.0, 0.5, 2.0)}, budget).seen, "spread hides it"


def test_row_75_extrapolation_at_the_trained_length_is_the_model_itself(
    reports: Mapping[str, Report],
) -> None:
    """Rows 75 and 114: rescaling by 1, or a window of L, changes nothing at L."""
    by_contender = {row["contender"]: row for row in reports["extrapolation"].rows}
    for name in (*extrapolation.RESCALED, "rotary, window L"):
        assert by_contender[name]["loss at 1 L"] == pytest.approx(
            by_contender["rotary"]["loss at 1 L"], abs=1e-5
        ), name
        assert by_contender[name]["loss at 8 L"] != by_contender["rotary"]["loss at 8 L"], name
    assert [by_contender["learned"][f"loss at {k} L"] for k in (2, 4, 8)] == [None] * 3, "a table ends"
    assert by_contender["none"]["loss at 8 L"] is not None


def test_extrapolation_asks_for_the_same_bytes_at_every_length() -> None:
    """A model that sees the last byte alone cannot tell lengths apart."""
    spec = small(positions=NoPositions(), patterns=extrapolation.Window.last(1))
    run = train(spec, TOY, 0)
    losses = [extrapolation.tail_loss(run, spec, times) for times in (1, 2, 8)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, abs=1e-6)


def test_row_75_extrapolation_is_seen_only_when_longer_rows_are_not_worse() -> None:
    good, bad = [[1.0, 1.1], [1.0, 1.1], [1.0, 1.1], [0.99, 1.09]], [[1.0, 1.1], [2.0, 2.1]] * 2
    names = ("rotary", "rotary, window L", "sinusoidal", "ALiBi", "learned")
    losses = dict.fromkeys(names, good) | {"learned": [[1.0, 1.1], None, None, None]}
    report = extrapolation.judge(losses, TOY)
    assert report.claims["as well"]
    assert report.values["refused"] == ["learned"]
    assert not extrapolation.judge({**losses, "rotary": bad}, TOY).claims["as well"]
    noisy = [[1.0, 1.1], [1.0, 1.1], [1.0, 1.1], [0.9, 1.2]]
    assert not extrapolation.judge({**losses, "rotary": noisy}, TOY).claims["as well"], (
        "a wide spread shows nothing"
    )
    rescaled = {**losses, **dict.fromkeys(extrapolation.RESCALED, bad)}
    assert extrapolation.judge(rescaled, TOY).claims["rescaled"]
    rescaled["rotary, YaRN"] = good
    assert not extrapolation.judge(rescaled, TOY).claims["rescaled"]


def test_row_69_layers_turn_where_they_are_said_to() -> None:
    """Row 69."""
    turned = {
        name: [isinstance(scheme.at(i), Rotary) for i in range(4)]
        for name, scheme in CONTESTS["rotary-layers"].schemes.items()
    }
    assert turned == {
        "all": [True] * 4,
        "every other": [True, False, True, False],
        "first only": [True, False, False, False],
        "last only": [False, False, False, True],
        "none": [False] * 4,
    }
    assert isinstance(CONTESTS["rotary-layers"].schemes["all"], PerLayer)


def test_rows_68_and_70_switches_rank_by_loss_and_say_what_is_worse() -> None:
    """Rows 68 and 70."""
    low, high = made(1.0, 1.1, 1.2), made(1.3, 1.4, 1.51)
    switches, budget = CONTESTS["rotary-switches"], Budget(seeds=(0, 1, 2))
    results = {name: high if "equal" in name else low for name in switches.schemes}
    report = switches.judge(results, budget)
    assert report.claims == dict.fromkeys(switches.claims) | {"equal": True}, "equal ones tell nothing"
    ranking = list(report.values["ranking"])
    assert ranking.index("powers") < ranking.index("equal to 1")
    assert not switches.judge({**results, "equal to 1": low}, budget).claims["equal"]


def test_row_62_drift_is_that_of_the_model_and_can_be_put_back() -> None:
    """Row 62."""
    spec = small(positions=Rotary(pairing="halves", trainable=True))
    run = train(spec, TOY, 0)
    drift = rotary_trained.drifts(run)
    assert drift.shape == (2, 8)
    assert float(drift.abs().min()) > 0, "every frequency is trained"
    fixed = build(replace(spec, positions=Rotary(pairing="halves")), seed=0)
    fixed.load_state_dict(
        {k: v for k, v in run.model.state_dict().items() if not k.endswith("frequency_offset")}
    )
    assert rotary_trained.without_drift(run) == pytest.approx(runs.held_out_loss(fixed, TOY.tokens), abs=1e-6)
    assert torch.equal(rotary_trained.drifts(run), drift), "and it is as it was"


def test_row_62_frequencies_that_move_are_noticed_beyond_the_spread_of_seeds() -> None:
    """Row 62."""
    results = {"fixed": made(1.0, 1.1), "trained": made(0.9, 1.0)}
    still, moved = torch.full((2, 2, 8), 1e-3), torch.full((2, 2, 8), 0.1)
    move, used, worth = rotary_trained.judge(results, moved, [1.01, 1.12], TOY).claims.values()
    assert (move, used, worth) == (True, True, True)
    assert list(rotary_trained.judge(results, still, [0.9, 1.0], TOY).claims.values()) == [False, None, True]
    one_seed = torch.stack((moved[0], still[0]))
    assert not next(iter(rotary_trained.judge(results, one_seed, [1.01, 1.12], TOY).claims.values()))
    alike = {"fixed": made(1.0, 1.1), "trained": made(1.01, 1.08)}
    assert list(rotary_trained.judge(alike, moved, [1.5, 1.6], TOY).claims.values())[2] is None


def test_row_33_the_ladder_ends_in_llama_and_changes_only_what_differs() -> None:
    """Row 33: nothing but the declared differences stands between the two."""
    *rungs, alone = blocks.ladder().values()
    llama = small(hidden=blocks.HIDDEN, kv_heads=blocks.KV_HEADS)
    assert replace(rungs[-1], family="llama", norm_eps=llama.norm_eps) == llama
    assert replace(alone, hidden=blocks.HIDDEN) == rungs[-1]
    declared = {difference.aspect for difference in blocks.base_and_llama()}
    changed = {difference.aspect for pair in pairwise(rungs) for difference in differences(*pair)}
    assert changed == declared - {"family", "context", "dropout", "embedding"}
    assert isinstance(rungs[0].positions, Sinusoidal)


def test_row_33_the_listed_differences_are_those_of_the_document() -> None:
    """Row 33: pre-norm and RMSNorm, rotary, SwiGLU, grouped keys."""
    aspects = {
        difference.aspect: (difference.first, difference.second) for difference in blocks.base_and_llama()
    }
    for aspect, base, llama in (
        ("order", "post: norm(x + f(x))", "pre: x + f(norm(x))"),
        ("norm", "LayerNorm", "RMSNorm"),
        ("positions", "on embeddings: Sinusoidal()", "on queries and keys: Rotary"),
        ("feed-forward", "relu(up x)", "silu(gate x) * up x"),
        ("heads", "8 key/value (MHA)", "2 key/value (GQA)"),
    ):
        assert base in aspects[aspect][0]
        assert llama in aspects[aspect][1]


def test_row_32_gated_and_plain_have_equally_many_parameters() -> None:
    """Row 32."""
    rungs = blocks.ladder()
    plain, gated = (cost.parameters(rungs[name])["feed-forward"] for name in ("+ rotary", "+ SwiGLU"))
    assert abs(plain - gated) / gated < 0.01


def test_rows_30_and_33_blocks_tell_which_rung_helps() -> None:
    """Row 30: RMSNorm does as well as LayerNorm, not better."""
    names = list(blocks.ladder())
    results = {name: made(2.0 - 0.1 * i, 2.1 - 0.1 * i) for i, name in enumerate(names)}
    results["+ RMSNorm"] = results["+ pre-norm"]
    layer_norm, *rms = blocks.norm_times()
    times = {layer_norm: [2.0, 2.1, 2.2], **{name: [1.0, 1.2, 1.1] for name in rms}}
    report = blocks.judge(results, times, TOY)
    faster = [("time", name) for name in rms]
    assert report.claims["whole"]
    assert all(report.claims[claim] for claim in (*faster, "RMSNorm"))
    assert not report.claims["shared"]
    assert not report.claims["alone"]
    lost = blocks.judge({**results, blocks.ALONE: results["2017"]}, times, TOY).claims
    assert lost["alone"]
    slow = blocks.judge(results, {**times, rms[0]: [1.0, 4.0, 2.0]}, TOY).claims
    assert [slow[claim] for claim in faster] == [None, True], "each norm by its own rounds"
    noisy = blocks.judge({**results, "+ RMSNorm": made(1.8, 2.1)}, times, TOY)
    assert not noisy.claims["RMSNorm"], "no difference seen is none shown"
    assert not blocks.judge({**results, blocks.LLAMA: results["2017"]}, times, TOY).claims[
        next(iter(report.claims))
    ]


def test_row_82_linear_attention_keeps_bytes_by_length_and_dense_by_pairs(
    reports: Mapping[str, Report],
) -> None:
    """Row 82."""
    costs = linear_training.measure(linear_training.LENGTHS)
    (_, linear), (_, dense) = (linear_training.slopes(costs, name) for name in ("linear", "softmax, dense"))
    assert linear == pytest.approx(1, abs=linear_training.SLOPE)
    assert dense > 1.2
    report = reports["linear-training"]
    kept = [row["MiB kept"] for row in report.rows if row.get("attention") == "linear"]
    again = [row["MiB kept"] for row in costs if row["attention"] == "linear"]
    assert kept == again, "bytes are counted, not sampled"


def test_linear_attention_that_learns_nothing_is_not_seen() -> None:
    def cost(name: str, tokens: int, ms: float, size: float) -> Row:
        return {"attention": name, "tokens": tokens, "ms a step": ms, "MiB kept": size}

    costs = [cost(name, n, n / 64, n) for name in linear_training.FORMS for n in (64, 128)]
    good = {name: made(2.0, 2.1) for name in linear_training.contenders()}
    assert linear_training.judge(good, costs, 3.0, TOY).claims["learns"]
    assert not linear_training.judge(good, costs, 2.05, TOY).claims["learns"]
    for most in (400, 100):
        other = [row for row in costs if row["attention"] != "linear"]
        other += [cost("linear", 64, 1.0, 100), cost("linear", 128, 4.0, most)]
        report = linear_training.judge(good, other, 3.0, TOY)
        assert not report.claims["bytes"], (
            "bytes by pairs, and bytes that do not grow, are not bytes by length"
        )
    assert linear_training.judge(good, costs, 3.0, TOY).claims["bytes"]


def test_guessing_without_context_costs_the_entropy_of_bytes() -> None:
    assert 2.5 < linear_training.unigram() < math.log(256)


def test_learned_tables_are_as_long_as_rows() -> None:
    assert position_schemes(64)["learned"] == Learned(64)
    assert CONTESTS["positions"].schemes == position_schemes(Budget().tokens)
