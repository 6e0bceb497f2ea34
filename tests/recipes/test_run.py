"""A recipe is a sequence of ordinary runs: what each begins with, and that it resumes wherever it was killed."""

import json
import operator
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoints import load_folder
from headway.errors import ConfigError
from headway.recipes import Recipe, run_recipe
from headway.recipes.claims import Claim
from headway.recipes.surgery import moments_after
from headway.storage.tensors import open_tensors
from headway.surgery import pool_heads
from headway.train.checkpoint import MOMENTS, checkpoints, state_tensors
from headway.train.lock import locked
from tests.recipes.test_shipped import small
from tests.train.test_resume import assert_same_bits, in_a_child, killed_at_micro_batch

Make = Callable[..., Recipe]


def final(recipe: Recipe, stage: int, seed: int = 0) -> Path:
    return recipe.stage_folder(recipe.stages[stage], seed) / "final"


def test_each_stage_begins_with_what_its_source_trained(make: Make) -> None:
    recipe = make("out")
    report = run_recipe(recipe, quiet=True)
    mha = load_folder(final(recipe, 0))
    start = load_folder(recipe.stage_folder(recipe.stages[1], 0) / "start")
    spec, pooled = pool_heads(mha.spec, mha.tensors, 2)
    assert start.spec == spec
    assert all(torch.equal(start.tensors[name], value) for name, value in pooled.items())
    assert load_folder(final(recipe, 3)).spec.trained_context == 48
    assert str(load_folder(final(recipe, 4)).spec.patterns[0]) == "Window.last(8)"
    measures = report.measures(0)
    assert measures["mha"]["val_loss"] != measures["mean"]["start_loss"]
    assert [m["steps"] for m in measures.values()] == [4, 4, 4, 4, 3]
    assert measures["mean"]["kv_bytes_per_token"] * 2 == measures["mha"]["kv_bytes_per_token"]


def test_a_stage_without_surgery_begins_where_its_source_ended(make: Make) -> None:
    recipe = make("out", [{"name": "one"}, {"name": "two", "moments": "keep"}])
    measures = run_recipe(recipe, quiet=True).measures(0)
    assert measures["two"]["start_loss"] == pytest.approx(measures["one"]["val_loss"], abs=1e-12)
    one, two = (recipe.stage_folder(stage, 0) for stage in recipe.stages)
    before, after = state_tensors(checkpoints(one)[-1], MOMENTS), open_tensors(two / "moments.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert any("exp_avg_sq" in name for name in after)


def test_without_matplotlib_a_recipe_reports_without_its_picture(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headway.report.find_spec", lambda name: None)
    recipe = make("out", [{"name": "one"}], claims={"it learns": "one.val_loss < one.start_loss"})
    run_recipe(recipe)
    assert "one.val_loss < one.start_loss" in (report := (recipe.out / "report.md").read_text())
    assert ".png" not in report
    assert not [*recipe.out.rglob("*.png")]
    assert "report.png is not drawn: matplotlib is not installed" in capsys.readouterr().err


def test_a_translator_s_sentences_are_looked_at_before_it_is_trained(tmp_path: Path) -> None:
    shipped = small("gqa-translation", tmp_path / "out")
    recipe = replace(shipped, tests=(tmp_path / "lost.en", tmp_path / "target"))
    with pytest.raises(ConfigError, match=r"tests: .*lost\.en: no such file"):
        run_recipe(recipe, quiet=True)
    assert not [*recipe.out.rglob("stage.json")]


def test_the_files_of_all_stages_are_looked_at_before_the_first_is_run(make: Make) -> None:
    held = {"validation": "b.txt", "validation_share": 0.0}
    stages = [{"name": "one"}, {"name": "two", "data": "a.txt"}, {"name": "three", **held}]
    recipe = make("out", stages)
    message = r"two: data a\.txt: no such file or folder\nthree: validation b\.txt: .*\nPaths are"
    with pytest.raises(ConfigError, match=message):
        run_recipe(recipe, quiet=True)
    assert not (recipe.stage_folder(recipe.stages[0], 0) / "config.yaml").exists()


def test_killed_in_every_stage_it_goes_on_to_the_bit(make: Make) -> None:
    """Two micro-batches a step, one in `long`; killed in the third step of each stage in turn."""
    whole, killed = make("whole"), make("killed")
    run_recipe(whole, quiet=True)
    for count in (5, 8 - 4 + 5, 8 - 4 + 5, 8 - 4 + 3, 4 - 2 + 5):
        run = killed_at_micro_batch(killed, count, run_recipe)  # type: ignore[arg-type]
        assert in_a_child(run) == -signal.SIGKILL
    assert not (killed.stage_folder(killed.stages[-1], 0) / "final").exists()
    with pytest.raises(ConfigError, match="is not empty; resume it with --resume auto"):
        run_recipe(killed, quiet=True)
    run_recipe(killed, resume="auto", quiet=True)
    for s in whole.stages:
        assert_same_bits(str(killed.stage_folder(s, 0)), str(whole.stage_folder(s, 0)))


def test_the_gradient_of_a_pooled_head_is_the_sum_of_those_that_it_stands_for(make: Make) -> None:
    """The moments after surgery follow from this: m' exactly, v' as an upper bound."""
    recipe = make("out", [{"name": "mha"}])
    run_recipe(recipe, quiet=True)
    spec, last = load_folder(final(recipe, 0)).spec, checkpoints(recipe.stage_folder(recipe.stages[0], 0))[-1]
    last /= f"{MOMENTS}.safetensors"
    before, after = open_tensors(last), moments_after(last, spec, (("gqa", {"kv_heads": 2}),))
    name = "model.layers.0.self_attn.k_proj.weight"
    for field, factor in (("exp_avg", 1), ("exp_avg_sq", 2)):
        heads = before[f"{name}/{field}"].unflatten(0, (4, -1))
        expected = torch.stack([factor * (heads[0] + heads[1]), factor * (heads[2] + heads[3])]).flatten(0, 1)
        torch.testing.assert_close(after[f"{name}/{field}"], expected, rtol=1e-6, atol=0)
    assert after.keys() == before.keys()
    assert not any(
        ".k_proj." in n for n in moments_after(last, spec, (("gqa", {"kv_heads": 2, "pool": "random"}),))
    )


def test_seeds_make_runs_of_their_own_and_a_table_with_spread(make: Make) -> None:
    claims = {"it learns": "one.val_loss < one.start_loss", "it does not": "one.val_loss > one.start_loss"}
    stages = [{"name": "one", "published": {"loss": 1.7}}]
    recipe = make("out", stages, seeds=[0, 1], claims=claims)
    report = run_recipe(recipe, quiet=True)
    assert report.measures(0)["one"]["loss"] != report.measures(1)["one"]["loss"]
    verdicts = ["two seeds, it holds in both", "two seeds, it does not hold"]
    assert [verdict for _, _, verdict in report.verdicts] == verdicts
    losses = [report.measures(i)["one"]["val_loss"] for i in (0, 1)]
    head, (row,) = report.rows()
    spread = f"{np.mean(losses):.4g} ± {np.std(losses, ddof=1):.2g}"
    assert dict(zip(head, row, strict=True))["val_loss"] == spread
    assert spread in report.text()
    assert "published loss" in report.markdown().splitlines()[0]
    saved = json.loads((recipe.out / "report.json").read_text())
    assert [len(records) for records in saved["stages"]] == [1, 1]
    unknown = make("out", stages, seeds=[0, 1], claims={"x": "one.nothing > 1"})
    with pytest.raises(ConfigError, match="has no measure 'nothing'"):
        run_recipe(unknown, resume="auto", quiet=True)


def test_a_stage_that_is_done_keeps_its_surgery(make: Make) -> None:
    def stages(kv_heads: int) -> list[dict[str, object]]:
        return [{"name": "one", "steps": 1}, {"name": "two", "steps": 1, "surgery": {"gqa": kv_heads}}]

    run_recipe(make("out", stages(2)), quiet=True)
    with pytest.raises(ConfigError, match="2-two was run with other settings"):
        run_recipe(make("out", stages(1)), resume="auto", quiet=True)


def test_a_stage_that_is_done_keeps_its_settings(make: Make) -> None:
    run_recipe(make("out", [{"name": "one"}]), quiet=True)
    with pytest.raises(ConfigError, match="was run with other settings"):
        run_recipe(make("out", [{"name": "one", "lr": 1e-4}]), resume="auto", quiet=True)
    same = make("out", [{"name": "one", "threads": 1, "log_every": 3}])
    other = run_recipe(same, resume="auto", quiet=True)
    assert other.measures(0)["one"]["steps"] == 4


def test_an_adapter_is_in_the_weights_that_the_next_stage_begins_with(make: Make) -> None:
    stages = [{"name": "base"}, {"name": "lora", "adapter": "lora", "rank": 2}, {"name": "next", "steps": 1}]
    recipe = make("out", stages, decode=8)
    measures = run_recipe(recipe, quiet=True).measures(0)
    assert measures["next"]["start_loss"] == pytest.approx(measures["lora"]["val_loss"], rel=1e-5)
    assert measures["lora"]["start_loss"] == pytest.approx(measures["base"]["val_loss"], rel=1e-5)
    assert measures["lora"]["val_loss"] != measures["lora"]["start_loss"]
    assert measures["lora"]["decode_tokens_per_s"] > 0


def test_fewer_than_three_seeds_are_told_and_are_no_verdict() -> None:
    claim = Claim.read("order", "a.x < b.x", ["a", "b"])
    holds, fails = ({"a": {"x": 1.0}, "b": {"x": x}} for x in (2.0, 0.0))
    assert claim.verdict([holds]) == "one seed, it holds"
    assert claim.verdict([fails]) == "one seed, it does not hold"
    assert claim.verdict([holds, holds]) == "two seeds, it holds in both"
    assert claim.verdict([fails, holds]) == "two seeds, it holds in one"
    assert claim.verdict([fails, fails]) == "two seeds, it does not hold"


def test_a_claim_is_seen_when_every_seed_shows_it() -> None:
    claim = Claim.read("order", "a.x < b.x < c.x", ["a", "b", "c"])
    ordered = {"a": {"x": 1.0}, "b": {"x": 2.0}, "c": {"x": 3.0}}
    other = {**ordered, "c": {"x": 1.5}}
    assert claim.verdict([ordered] * 3) == "seen (3 of 3 seeds)"
    assert claim.verdict([ordered, other, ordered]) == "not seen at this size (2 of 3 seeds)"
    assert not claim.holds({**ordered, "c": {"x": 0.0}})
    assert claim.margins({**ordered, "c": {"x": 0.5}}) == [1.0, -1.5]
    assert Claim.read("at", "a.val_accuracy@128 > 0.5 * -a.y", ["a"]).holds(
        {"a": {"val_accuracy@128": 0.1, "y": 2}}
    )


@pytest.mark.parametrize(
    ("margins", "said"),
    [
        ((0.1, 0.2, 0.3), "seen"),  # mean 0.2, standard error 0.058
        ((0.01, 0.02, 0.2), "within the spread of seeds"),  # mean 0.077, standard error 0.062
        ((-0.01, 0.2, 0.2), "not seen at this size"),
        ((0.01, 0.02, 0.1, 0.1, 0.1), "seen"),  # mean 0.066, standard error 0.021
        ((0.0, 0.0, 0.0), "not seen at this size"),
    ],
)
@pytest.mark.parametrize("rule", ["a.x < b.x", "b.x > a.x", "a.x < b.x < c.x", "a.x < b.x < 9"])
def test_a_difference_within_the_spread_of_seeds_is_not_seen(
    margins: tuple[float, ...], said: str, rule: str
) -> None:
    """In any comparison of the chain; c is far above b."""
    claim = Claim.read("order", rule, ["a", "b", "c"])
    seeds = [{"a": {"x": 1.0}, "b": {"x": 1.0 + margin}, "c": {"x": 8.0}} for margin in margins]
    count = sum(margin > 0 for margin in margins)
    assert claim.verdict(seeds) == f"{said} ({count} of {len(margins)} seeds)"


def test_equal_sizes_of_all_seeds_have_no_spread() -> None:
    claim = Claim.read("bytes", "4 * a.x <= b.x", ["a", "b"])
    assert claim.verdict([{"a": {"x": 1}, "b": {"x": 4}}] * 3) == "seen (3 of 3 seeds)"


SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@given(st.sampled_from([*SIGNS]), st.integers(-2, 2), st.integers(-2, 2))
def test_a_claim_compares_as_its_sign_says(sign: str, a: int, b: int) -> None:
    """Equal values, too."""
    claim = Claim.read("order", f"a.x {sign} b.x", ["a", "b"])
    assert claim.holds({"a": {"x": a}, "b": {"x": b}}) == SIGNS[sign](a, b)


NUMBERS = st.one_of(st.integers(0, 9).map(str), st.sampled_from(["a.x", "b.y"]))
FORMULAS = st.recursive(
    NUMBERS,
    lambda side: st.one_of(
        st.tuples(side, st.sampled_from("+-*/"), side).map(lambda parts: f"({' '.join(parts)})"),
        side.map(lambda text: f"-{text}"),
    ),
    max_leaves=6,
)


@given(FORMULAS, st.integers(1, 9), st.integers(1, 9))
def test_arithmetic_in_a_claim_is_pythons(formula: str, x: int, y: int) -> None:
    measures = {"a": {"x": x}, "b": {"y": y}}
    claim = Claim.read("arithmetic", f"{formula} >= 1", ["a", "b"])
    try:
        value = eval(formula.replace("a.x", str(x)).replace("b.y", str(y)))
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            claim.holds(measures)
        return
    assert claim.holds(measures) == (value >= 1), (formula, value)


CHAIN = [
    {"name": "base"},
    {"name": "lora", "adapter": "lora", "rank": 2, "steps": 2},
    {"name": "next", "steps": 2, "moments": "keep"},
]


@pytest.mark.parametrize("seeds", [[0, 1], pytest.param([0], marks=pytest.mark.slow)])
def test_a_folder_that_moved_goes_on_where_it_was_stopped(
    make: Make, tmp_path: Path, seeds: list[int]
) -> None:
    """Killed in its last stage, whose model and moments are in the folder; stages that are done are not run again."""
    whole, killed = make("whole", CHAIN, seeds=seeds), make("killed", CHAIN, seeds=seeds)
    run_recipe(whole, quiet=True)
    run = killed_at_micro_batch(killed, 8 + 4 + 3, run_recipe)  # type: ignore[arg-type]
    assert in_a_child(run) == -signal.SIGKILL
    (tmp_path / "killed").rename(tmp_path / "moved")
    moved = make("moved", CHAIN, seeds=seeds)
    finished = moved.stage_folder(moved.stages[1], 0) / "final" / "adapter_model.safetensors"
    before = finished.stat()
    run_recipe(moved, resume="auto", quiet=True)
    assert finished.stat() == before
    for s in whole.stages:
        assert_same_bits(str(moved.stage_folder(s, 0)), str(whole.stage_folder(s, 0)))


def test_a_recipe_takes_more_seeds_and_fewer(make: Make) -> None:
    single = run_recipe(make("out", CHAIN[:2]), quiet=True)
    with pytest.raises(ConfigError, match="was run with other settings"):
        run_recipe(make("out", CHAIN[:2], lr=1e-4), resume="auto", quiet=True)
    both = run_recipe(make("out", CHAIN, seeds=[0, 1]), resume="auto", quiet=True)
    assert both.measures(0)["lora"] == single.measures(0)["lora"]
    assert both.measures(1)["lora"]["loss"] != single.measures(0)["lora"]["loss"]
    other_seed = run_recipe(make("out", CHAIN, seed=1), resume="auto", quiet=True)
    assert other_seed.measures(0) == both.measures(1)


def test_a_second_start_of_a_recipe_says_who_runs_it(make: Make, tmp_path: Path) -> None:
    recipe = make("out", [{"name": "one"}])
    with locked(recipe.out):
        for resume in ("never", "auto"):
            with pytest.raises(ConfigError, match="out is in use by process"):
                run_recipe(recipe, resume=resume, quiet=True)
    assert not recipe.out.exists()
