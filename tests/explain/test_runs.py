"""The harness of small training runs, and the topics that need one (rows 30, 32, 33, 62, 68 to 70, 74, 75, 82, 114)."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from matplotlib.figure import Figure

from headway.errors import ConfigError, DataError
from headway.models import ModelSpec, build, cost
from headway.positions import Learned, NoPositions, PerLayer, Rotary, Sinusoidal
from headway_lab.explain import (
    blocks,
    extrapolation,
    find_topic,
    linear_training,
    rotary_trained,
    runs,
)
from headway_lab.explain.contests import CONTESTS, gaps, position_schemes, rows
from headway_lab.explain.report import Report, Row
from headway_lab.explain.runs import Budget, BytePrediction, Run, batch_of, contend, mean_loss, small, train
from headway_lab.explain.spread import Gap, gap, log_gap

NAMES = (*CONTESTS, "extrapolation", "rotary-trained", "blocks", "linear-training")
TOY = Budget(steps=2, rows=2, seeds=(0, 1))
SMALL = {"steps": 2, "seeds": (0, 1)}


@pytest.fixture(scope="module", autouse=True)
def toy_size() -> Iterator[None]:
    """Few rows to judge by; short rows where rows grow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "HELD_OUT_ROWS", 8)
        patch.setattr(extrapolation, "ROWS", 2)
        patch.setattr(linear_training, "LENGTHS", (64, 128, 256))
        patch.setattr(linear_training, "REPEATS", 1)
        patch.setattr(blocks, "REPEATS", 2)
        yield


@pytest.fixture(scope="module")
def reports(toy_size: None) -> dict[str, Report]:
    return {name: find_topic(name).run(**SMALL) for name in NAMES}


def made(*losses: float, size: int = 1) -> tuple[Run, ...]:
    """Runs whose losses are given."""
    model = build(small(layers=size), device="meta")
    return tuple(Run(model, loss, (loss,), 1.0, 1, 0) for loss in losses)


# -- the harness -------------------------------------------------------------------------------------------


def test_contenders_of_a_seed_have_equal_budgets_and_equal_data_in_equal_order() -> None:
    found = contend({"rotary": small(), "none": small(positions=NoPositions()), "wide": small(width=32)}, TOY)
    for own in found.values():
        assert [run.trained for run in own] == [TOY.steps * TOY.rows * TOY.tokens] * 2
        assert [len(run.curve) for run in own] == [TOY.steps] * 2
        assert [run.digest for run in own] == [run.digest for run in found["rotary"]]
    first, second = found["rotary"]
    assert first.digest != second.digest, "another seed sees other rows"


def test_contenders_of_a_seed_start_from_the_same_weights_where_shapes_agree() -> None:
    one, two = build(small(), seed=3), build(small(positions=NoPositions()), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_seed_gives_the_same_run_again_on_any_number_of_threads() -> None:
    spec = {"rotary": small()}
    one = contend(spec, TOY)["rotary"]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = contend(spec, TOY)["rotary"]
        assert torch.get_num_threads() == 2, "the setting comes back"
    finally:
        torch.set_num_threads(before)
    assert [run.curve for run in one] == [run.curve for run in two]
    assert [run.loss for run in one] == [run.loss for run in two]
    assert one[0].loss != one[1].loss


def test_training_lowers_the_loss_of_text_that_was_not_trained_on() -> None:
    run = train(small(), Budget(steps=20, rows=4, seeds=(0, 1)), 0)
    fresh = runs.held_out_loss(build(small(), seed=0), TOY.tokens)
    assert run.loss < fresh - 1
    assert run.curve[-1] < run.curve[0] - 1


@pytest.mark.parametrize(
    "spec", [small(), linear_training.contenders()["linear"]], ids=["decoder", "encoder"]
)
def test_a_run_is_adam_on_the_mean_loss(spec: ModelSpec) -> None:
    """Against the loop written out: three steps, clipped, on the rows and masks of the seed."""
    budget = Budget(steps=3, rows=2, seeds=(0, 1))
    model, objective = build(spec, seed=1), BytePrediction(budget, 1, spec.causal)
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    curve = []
    for step in range(3):
        ((inputs, targets),) = objective.batches(step)
        share = (step + 1) / 3
        assert share > runs.WARM_UP
        cosine = 0.5 + 0.5 * math.cos(math.pi * (share - runs.WARM_UP) / (1 - runs.WARM_UP))
        adam.param_groups[0]["lr"] = budget.rate * (runs.FLOOR + (1 - runs.FLOOR) * cosine)
        loss = torch.nn.functional.cross_entropy(model(**inputs).flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), runs.CLIP)
        adam.step()
        curve.append(loss.item())
    assert train(spec, budget, 1).curve == pytest.approx(curve, rel=1e-5)


def test_training_and_held_out_text_share_no_module() -> None:
    train_text, held = runs.text()
    assert min(len(train_text), len(held)) > runs.LEAST_BYTES
    assert int(held.min()) > 0, "no byte is the mask"
    middle = bytes(held[5000:5400].tolist())
    assert middle not in bytes(train_text.tolist())


def test_a_python_without_its_library_as_files_is_told(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(runs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="0 bytes of Python modules to train on and 0 held out, 100000 each"):
        runs.text.__wrapped__()


def test_a_hidden_byte_does_not_reach_the_encoder() -> None:
    model = build(linear_training.contenders()["softmax"], seed=0).eval()
    ids = runs.held_out_rows(32, 2)
    noise = torch.Generator().manual_seed(5)
    hidden = torch.rand(2, 32, generator=noise) < runs.MASKED
    hidden[:, 0] = True
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, named: seen.append(named["ids"]), with_kwargs=True)
    loss = mean_loss(model, batch_of(ids, False, torch.Generator().manual_seed(5)))
    assert (seen[0][hidden] == runs.MASK).all()
    assert torch.equal(seen[0][~hidden], ids[:, :-1][~hidden])
    logits = model(ids=seen[0])[hidden]
    expected = torch.nn.functional.cross_entropy(logits, ids[:, :-1][hidden])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)


# -- the verdict on numbers that are made up ---------------------------------------------------------------


def test_a_gap_is_the_paired_t_interval() -> None:
    """Against the formula written out: n = 4, t = 3.182."""
    a, b = [2.0, 2.2, 1.9, 2.4], [1.5, 1.9, 1.3, 2.0]
    apart = [x - y for x, y in zip(a, b, strict=True)]
    found = gap(a, b)
    assert found.mean == pytest.approx(sum(apart) / 4)
    variance = sum((x - found.mean) ** 2 for x in apart) / 3
    assert found.bound == pytest.approx(3.182 * math.sqrt(variance / 4))
    assert found.higher
    assert not found.lower
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
        assert (lost.higher, lost.lower) == (False, False)


def test_where_nothing_differs_one_run_in_twenty_says_otherwise() -> None:
    """The points of t are right: 4000 draws, 5 % within four standard deviations of the count."""
    noise = torch.Generator().manual_seed(0)
    for seeds in (2, 3, 4, 6, 10):
        draws = torch.randn(4000, seeds, generator=noise, dtype=torch.float64)
        share = statistics.fmean(gap(row, [0.0] * seeds).seen for row in draws.tolist())
        assert share == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 4000)), seeds


def test_what_is_shown_to_be_small_has_a_small_bound_too() -> None:
    assert Gap(0.01, 0.01).within(0.05)
    assert not Gap(0.01, 0.1).within(0.05), "no difference seen is none shown"
    assert not Gap(-0.1, 0.01).within(0.05)
    assert Gap(-0.1, 0.01).below(0.05)
    assert not Gap(0.0, 0.06).below(0.05)
    half = log_gap([1.0, 1.1, 0.9], [2.0, 2.2, 1.8])
    assert half.factor == "0.5 (0.5 to 0.5)"
    assert half.lower


def test_one_seed_has_no_spread() -> None:
    with pytest.raises(ConfigError, match=r"two different seeds or more, got \(0, 0\)"):
        Budget(seeds=(0, 0))


def test_rows_measure_each_contender_against_the_one_that_is_named() -> None:
    found = {"a": made(1.0, 2.0), "b": made(1.5, 2.5), "c": made(1.5, 2.6)}
    table = rows(found, (0, 1))
    assert [line["against"] for line in table] == [None, "a", "b"]
    assert [table[1][name] for name in ("gap", "bound", "seen")] == [0.5, 0.0, True]
    assert gaps(table) == {"b": gap([1.5, 2.5], [1.0, 2.0]), "c": gap([1.5, 2.6], [1.5, 2.5])}
    assert gaps(rows(found, (0, 1), "a"))["c"] == gap([1.5, 2.6], [1.0, 2.0])
    assert [line["against"] for line in rows(found, (0, 1), "b")] == ["b", None, "b"]
    assert [(line["seed 0"], line["seed 1"]) for line in table] == [(1.0, 2.0), (1.5, 2.5), (1.5, 2.6)]


# -- the topics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_topic_runs_and_draws_with_labels(name: str, reports: dict[str, Report]) -> None:
    found, topic = reports[name], find_topic(name)
    assert "2 steps of 8 x 64 bytes" in found.verdict
    assert "seeds 0, 1" in found.verdict
    figure = Figure()
    topic.draw(figure, found)
    for axes in figure.axes:
        assert axes.get_title(loc="left") or axes.get_title()
        assert axes.get_xlabel()


@pytest.mark.parametrize("name", [*CONTESTS, "blocks"])
def test_contenders_of_a_topic_have_equal_sizes_but_for_their_switch(
    name: str, reports: dict[str, Report]
) -> None:
    sizes = reports[name].column("parameters")
    smallest = 0.93 if name == "blocks" else 0.96  # shared keys; tables of positions
    assert min(sizes) > smallest * max(sizes)


def test_row_74_positions_says_rotary_only_when_it_is_lower() -> None:
    """Row 74."""
    low = made(1.00, 1.01, 0.99, 1.00)
    high = made(1.20, 1.22, 1.19, 1.21)
    positions, budget = CONTESTS["positions"], Budget()
    found = {name: low if name == "rotary" else high for name in positions.schemes}
    assert positions.judge(found, budget).seen
    assert not positions.judge({**found, "learned": low}, budget).seen
    assert not positions.judge({**found, "rotary": made(1.5, 1.5, 1.5, 1.5)}, budget).seen
    assert not positions.judge({**found, "none": made(1.0, 3.0, 0.5, 2.0)}, budget).seen, "spread hides it"


def test_row_75_extrapolation_at_the_trained_length_is_the_model_itself(
    reports: dict[str, Report],
) -> None:
    """Rows 75 and 114: rescaled by 1, or through a window of L, nothing changes at L."""
    found = {row["contender"]: row for row in reports["extrapolation"].rows}
    for name in (*extrapolation.RESCALED, "rotary, window L"):
        assert found[name]["loss at 1 L"] == pytest.approx(found["rotary"]["loss at 1 L"], abs=1e-5), name
        assert found[name]["loss at 8 L"] != found["rotary"]["loss at 8 L"], name
    assert [found["learned"][f"loss at {k} L"] for k in (2, 4, 8)] == [None] * 3, "a table ends"
    assert found["none"]["loss at 8 L"] is not None


def test_extrapolation_asks_for_the_same_bytes_at_every_length() -> None:
    """A model that sees the last byte alone cannot tell lengths apart."""
    spec = small(positions=NoPositions(), patterns=extrapolation.Window.last(1))
    run = train(spec, TOY, 0)
    losses = [extrapolation.tail_loss(run, spec, times) for times in (1, 2, 8)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, abs=1e-6)


def test_row_75_extrapolation_is_seen_only_when_longer_rows_are_not_worse() -> None:
    good, bad = [[1.0, 1.1], [1.0, 1.1], [1.0, 1.1], [0.99, 1.09]], [[1.0, 1.1], [2.0, 2.1]] * 2
    names = ("rotary", "rotary, window L", "sinusoidal", "ALiBi", "learned")
    found = dict.fromkeys(names, good) | {"learned": [[1.0, 1.1], None, None, None]}
    told = extrapolation.judge(found, TOY)
    as_well = "rotary reads rows of 8 L as well as rows of L, within 0.05"
    assert told.claims[as_well]
    assert "refused: learned" in told.finding
    assert not extrapolation.judge({**found, "rotary": bad}, TOY).claims[as_well]
    noisy = [[1.0, 1.1], [1.0, 1.1], [1.0, 1.1], [0.9, 1.2]]
    assert not extrapolation.judge({**found, "rotary": noisy}, TOY).claims[as_well], (
        "a wide spread shows nothing"
    )
    rescaled = {**found, **dict.fromkeys(extrapolation.RESCALED, bad)}
    assert extrapolation.judge(rescaled, TOY).claims["and ends lower than by any rescaling"]
    rescaled["rotary, YaRN"] = good
    assert not extrapolation.judge(rescaled, TOY).claims["and ends lower than by any rescaling"]


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
    found = {name: high if "equal" in name else low for name in switches.schemes}
    told = switches.judge(found, budget)
    equal = "equal frequencies end higher than powers"
    assert told.claims == dict.fromkeys(switches.claims, False) | {equal: True}
    assert told.finding.index("powers 1.100") < told.finding.index("equal to 1 1.403")
    assert not switches.judge({**found, "equal to 1": low}, budget).claims[equal]


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
    found = {"fixed": made(1.0, 1.1), "trained": made(0.9, 1.0)}
    still, moved = torch.full((2, 2, 8), 1e-3), torch.full((2, 2, 8), 0.1)
    move, used, worth = rotary_trained.judge(found, moved, [1.01, 1.12], TOY).claims.values()
    assert (move, used, worth) == (True, True, True)
    assert list(rotary_trained.judge(found, still, [0.9, 1.0], TOY).claims.values()) == [False, False, True]
    one_seed = torch.stack((moved[0], still[0]))
    assert not next(iter(rotary_trained.judge(found, one_seed, [1.01, 1.12], TOY).claims.values()))
    alike = {"fixed": made(1.0, 1.1), "trained": made(1.01, 1.08)}
    assert list(rotary_trained.judge(alike, moved, [1.5, 1.6], TOY).claims.values())[2] is False


def test_row_33_the_ladder_ends_in_llama_and_changes_only_what_differs() -> None:
    """Row 33: nothing but the declared differences stands between the two."""
    rungs = list(blocks.ladder().values())
    llama = small(hidden=blocks.HIDDEN, kv_heads=blocks.KV_HEADS)
    assert replace(rungs[-1], family="llama", norm_eps=llama.norm_eps) == llama
    declared = {name for name, _, _ in blocks.differences()}
    training = {"family", "trained_context", "dropout", "embedding_scale"}
    changed = {
        name
        for one, two in pairwise(rungs)
        for name in small().__dataclass_fields__
        if getattr(one, name) != getattr(two, name)
    }
    assert changed == declared - training
    assert isinstance(rungs[0].positions, Sinusoidal)


def test_row_33_the_listed_differences_are_those_of_the_document() -> None:
    """Row 33: pre-norm and RMSNorm, rotary, SwiGLU, grouped keys."""
    told = {name: (base, llama) for name, base, llama in blocks.differences()}
    assert told["order"] == ("post", "pre")
    assert told["norm"] == ("layer", "rms")
    assert told["positions"] == ("Sinusoidal", "Rotary")
    assert told["activation"] == ("relu", "silu")
    assert told["gated"] == ("False", "True")
    assert told["kv_heads"] == ("8", "2")


def test_row_32_gated_and_plain_have_equally_many_parameters() -> None:
    """Row 32."""
    rungs = blocks.ladder()
    plain, gated = (cost.parameters(rungs[name])["feed-forward"] for name in ("+ rotary", "+ SwiGLU"))
    assert abs(plain - gated) / gated < 0.01


def test_rows_30_and_33_blocks_tell_which_rung_helps() -> None:
    """Row 30: as well, not better."""
    names = list(blocks.ladder())
    found = {name: made(2.0 - 0.1 * i, 2.1 - 0.1 * i) for i, name in enumerate(names)}
    found["+ RMSNorm"] = found["+ pre-norm"]
    layer_norm, *rms = blocks.norm_times()
    times = {layer_norm: [2.0, 2.1, 2.2], **{name: [1.0, 1.2, 1.1] for name in rms}}
    told = blocks.judge(found, times, TOY)
    faster = [f"{name} takes less time than torch's LayerNorm" for name in rms]
    assert told.claims["LLaMA's block ends below that of 2017"]
    assert all(told.claims[claim] for claim in (*faster, "RMSNorm ends within 0.02 of LayerNorm"))
    assert not told.claims["sharing keys costs loss"]
    slow = blocks.judge(found, {**times, rms[0]: [1.0, 4.0, 2.0]}, TOY).claims
    assert [slow[claim] for claim in faster] == [False, True], "each norm by its own rounds"
    noisy = blocks.judge({**found, "+ RMSNorm": made(1.8, 2.1)}, times, TOY)
    assert not noisy.claims["RMSNorm ends within 0.02 of LayerNorm"], "no difference seen is none shown"
    assert not blocks.judge({**found, names[-1]: found["2017"]}, times, TOY).claims[next(iter(told.claims))]


def test_row_82_linear_attention_keeps_bytes_by_length_and_dense_by_pairs(reports: dict[str, Report]) -> None:
    """Row 82."""
    costs = linear_training.measure(linear_training.LENGTHS)
    (_, linear), (_, dense) = (linear_training.slopes(costs, name) for name in ("linear", "softmax, dense"))
    assert linear == pytest.approx(1, abs=linear_training.SLOPE)
    assert dense > 1.2
    found = reports["linear-training"]
    kept = [row["MiB kept"] for row in found.rows if row.get("attention") == "linear"]
    again = [row["MiB kept"] for row in costs if row["attention"] == "linear"]
    assert kept == again, "bytes are counted, not sampled"


def test_linear_attention_that_learns_nothing_is_not_seen() -> None:
    def cost(name: str, tokens: int, ms: float, size: float) -> Row:
        return {"attention": name, "tokens": tokens, "ms a step": ms, "MiB kept": size}

    costs = [cost(name, n, n / 64, n) for name in linear_training.COLOURS for n in (64, 128)]
    good = {name: made(2.0, 2.1) for name in linear_training.contenders()}
    learns, linear = "its loss falls below that of guessing without context", "bytes kept grow linearly"
    assert linear_training.judge(good, costs, 3.0, TOY).claims[learns]
    assert not linear_training.judge(good, costs, 2.05, TOY).claims[learns]
    for most in (400, 100):
        other = [row for row in costs if row["attention"] != "linear"]
        other += [cost("linear", 64, 1.0, 100), cost("linear", 128, 4.0, most)]
        found = linear_training.judge(good, other, 3.0, TOY)
        assert not found.claims[linear], "bytes by pairs, and bytes that do not grow, are not bytes by length"
    assert linear_training.judge(good, costs, 3.0, TOY).claims[linear]


def test_guessing_without_context_costs_the_entropy_of_bytes() -> None:
    assert 2.5 < linear_training.unigram() < math.log(256)


def test_a_gap_says_how_it_was_judged() -> None:
    assert str(Gap(0.05, 0.01)) == "+0.050 ± 0.010, seen"
    assert str(Gap(-0.05, 0.1)) == "-0.050 ± 0.100, not seen"


def test_learned_tables_are_as_long_as_rows() -> None:
    assert position_schemes(64)["learned"] == Learned(64)
    assert CONTESTS["positions"].schemes == position_schemes(Budget().tokens)
