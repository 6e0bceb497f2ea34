"""The shipped recipes of several stages: each is read, runs with --small, and resumes bit for bit when killed."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from headway.data.datasets import DATASETS
from headway.errors import ConfigError
from headway.models import cost
from headway.recipes import Recipe, read_recipe, run_recipe
from headway.recipes import run as recipes_run
from headway.train import TextConfig
from headway.train.config import TrainConfig
from headway.train.config_io import read_yaml
from headway.train.inputs import make_spec
from tests.recipes.toys import TOYS
from tests.train.test_resume import assert_same_bits, in_a_child, killed_at_micro_batch

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if "stages" in read_yaml(path))
IN_MAKE_TEST = {"context-extend", "roformer-six"}


def small(name: str, out: Path) -> Recipe:
    """Returns the small form of a recipe, with toy data in place of its own."""
    data = TOYS[name](out.parent)
    return read_recipe(FOLDER / f"{name}.yaml", [*data, f"out={out}", "threads=1"], small=True)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_understood(name: str) -> None:
    assert name in TOYS, f"{name} needs toy data in tests/recipes/toys.py"
    assert len(read_recipe(FOLDER / f"{name}.yaml").stages) > 1


@pytest.mark.parametrize(
    "name", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_recipe_runs_in_toy_size(name: str, tmp_path: Path) -> None:
    recipe = small(name, tmp_path / "out")
    report = run_recipe(recipe, quiet=True)
    assert all(measures["steps"] > 0 for measures in report.measures(0).values())
    assert len(report.verdicts) == len(recipe.claims)
    assert (recipe.out / "report.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_killed_in_every_stage_it_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    whole, killed = small(name, tmp_path / "whole"), small(name, tmp_path / "killed")
    run_recipe(whole, quiet=True)
    for stage in killed.stages:
        folder = killed.stage_folder(stage, killed.seeds[0])
        assert in_a_child(killed_inside(killed, folder)) == -signal.SIGKILL
        assert not (folder / "final").exists()
    run_recipe(killed, resume="auto", quiet=True)
    for stage in whole.stages:
        folders = (str(r.stage_folder(stage, r.seeds[0])) for r in (killed, whole))
        assert_same_bits(*folders)


def killed_inside(recipe: Recipe, folder: Path) -> Callable[[], None]:
    """Returns a function that resumes the recipe and kills its process in the first step of the run in `folder`."""

    def run() -> None:
        train = recipes_run.train

        def other(config: TrainConfig, **options: Any) -> Any:
            if Path(config.out) == folder:
                killed_at_micro_batch(config, 1)()
            return train(config, **options)

        recipes_run.train = other
        run_recipe(recipe, resume="auto", quiet=True)

    return run


def test_row_41_a_recipe_names_its_data_and_the_table_has_it() -> None:
    """Rows 41, 90, 92, 107, 108. Data that is not in the table is a folder of the user's own."""
    named = set()
    for name in RECIPES:
        for stage in read_recipe(FOLDER / f"{name}.yaml").stages:
            named |= {stage.settings[key] for key in ("data", "validation") if key in stage.settings}
    assert {path for path in named if not path.endswith("/")} == {*DATASETS}
    assert {path for path in named if path.endswith("/")} == {"books/"}


def test_a_recipe_whose_files_are_not_there_says_what_makes_them(tmp_path: Path) -> None:
    recipe = read_recipe(FOLDER / "longformer-charlm.yaml", [f"out={tmp_path}"])
    with pytest.raises(
        ConfigError, match=r"up1, up2, .* and full2: data text8.txt: no such.*`headway data text8"
    ):
        run_recipe(recipe, quiet=True)


def test_rows_90_and_92_encoders_are_compared_on_triplets_and_titles() -> None:
    """They have equal budgets, rows of two lengths, and the published numbers."""
    recipe = read_recipe(FOLDER / "roformer-chinese.yaml")
    stages = {stage.name: stage for stage in recipe.stages}
    published = {name: stage.published["test"] for name, stage in stages.items() if stage.published}
    assert published == {
        "bert_triplets": 67.77, "wobert_triplets": 68.10, "roformer_triplets": 68.29, "roformer_long": 69.79
    }  # fmt: skip
    equal = [
        {**stages[name].settings, "family": "", "units": "", "vocab": 0}
        for name in ("bert", "wobert", "roformer")
    ]
    assert equal[0] == equal[1] == equal[2]
    assert stages["roformer_long"].settings == {**stages["roformer_triplets"].settings, "context": 256}
    assert stages["wobert_titles"].settings == stages["roformer_titles"].settings
    rules = " ".join(claim.rule for claim in recipe.claims)
    assert "roformer_long.val_accuracy > roformer_triplets.val_accuracy" in rules
    assert "roformer_titles.val_accuracy > wobert_titles.val_accuracy - 0.01" in rules


def test_row_108_long_readers_are_compared_with_truncation() -> None:
    """Equal models are trained on the same records with the same steps; for answers, also with sliding windows."""
    recipe = read_recipe(FOLDER / "long-classify.yaml")
    assert {stage.source for stage in recipe.stages} == {None}
    settings = {stage.name: {**stage.settings, "micro_batch": None} for stage in recipe.stages}
    lengths = [settings[f"reviews{length}"].pop("context") for length in (128, 512, 2048)]
    assert lengths == [128, 512, 2048]
    assert settings["reviews128"] == settings["reviews512"] == settings["reviews2048"]
    assert settings["reviews128"]["too_long"] == "cut"
    recipe = read_recipe(FOLDER / "long-qa.yaml")
    stages = {stage.name: stage for stage in recipe.stages}
    assert {stages[name].source for name in ("long", "pieces", "beginning")} == {None}
    assert [stages[name].settings["context"] for name in ("long", "pieces", "beginning")] == [4096, 512, 512]
    assert stages["pieces"].settings.get("too_long") is None  # windows
    assert [claim.rule for claim in recipe.claims] == [
        "long.val_hit > long.val_guess",
        "long.val_hit > beginning.val_hit",
        "long.val_hit > pieces.val_hit",
    ]


def test_row_88_the_six_stages_are_the_published_ones_scaled() -> None:
    recipe = read_recipe(FOLDER / "roformer-six.yaml")
    for stage in recipe.stages:
        length, batch, steps = (stage.published[key] for key in ("length", "batch", "steps"))
        rows = stage.settings["batch_tokens"] // stage.settings["context"]
        assert (stage.settings["context"], rows) == (length // 4, batch // 16)
        assert stage.settings["steps"] == pytest.approx(steps / 200, abs=1)
        assert stage.moments == ("keep" if stage.source else "zero")
    claimed = {f"val_accuracy@{length}" for length in recipe.stages[0].settings["eval_contexts"]}
    assert all(any(name in claim.rule for claim in recipe.claims) for name in claimed)  # row 89


def test_rows_49_and_50_the_curve_has_its_controls_and_each_published_figure_its_claim() -> None:
    recipe = read_recipe(FOLDER / "gqa-uptrain.yaml")
    stages, rules = {s.name: s for s in recipe.stages}, " ".join(claim.rule for claim in recipe.claims)
    whole = stages["mha"].settings["steps"]
    steps, eval_every = (stages["mean2"].settings[name] for name in ("steps", "eval_every"))
    points = {step / whole for step in range(0, steps + 1, eval_every)}
    assert {0.0, 0.01, 0.02, 0.05, 0.1} <= points
    assert stages["scratch2"].settings["steps"] == whole + stages["mean2"].settings["steps"]
    assert stages["scratch2"].source is None
    assert all(f"{number} *" in rules for number in (1.003, 1.01, 0.993, 1.5, 0.85, 0.9))
    assert recipe.decode is not None
    assert len(recipe.seeds) == 3
    losses = [claim for claim in recipe.claims if re.search(r"val_loss .*(\d\.|1\.)\d+ \*", claim.rule)]
    assert losses
    assert all("loss" in claim.text or "lost" in claim.text or "of it" in claim.text for claim in losses)
    assert not any("section 2.2" in claim.text for claim in recipe.claims), "uptraining is section 2.1"


def test_row_107_all_character_models_have_equal_parameters_and_tokens(tmp_path: Path) -> None:
    recipe = read_recipe(FOLDER / "longformer-charlm.yaml")
    first = [
        make_spec(cast(TextConfig, s.config(tmp_path, 0)), 288) for s in recipe.stages if s.source is None
    ]
    assert len({cost.parameter_count(spec) for spec in first}) == 1
    names = ("layers", "down", "same", "dilated", "full")
    tokens = {
        sum(s.settings["steps"] * s.settings["batch_tokens"] for s in recipe.stages if s.name[:-1] == name)
        for name in (*names, "up")
    }
    assert len(tokens) == 1


def test_mixers_are_compared_at_one_budget(tmp_path: Path) -> None:
    """Parameters are equal to a thousandth, tokens and rates are the same; the hybrid replaces three layers of four."""
    recipe = read_recipe(FOLDER / "hybrid.yaml")
    specs = {s.name: make_spec(cast(TextConfig, s.config(tmp_path, 0)), 2048) for s in recipe.stages}
    counts = {name: cost.parameter_count(spec) for name, spec in specs.items()}
    assert list(counts) == ["full", "window", "linear", "delta", "hybrid"]
    assert max(counts.values()) < 1.001 * min(counts.values())
    different = {"patterns", "mixers", "hidden"}
    budgets = [{k: v for k, v in s.settings.items() if k not in different} for s in recipe.stages]
    assert all(budget == budgets[0] for budget in budgets)
    assert {name: spec.softmax_layers for name, spec in specs.items()} == {
        "full": (0, 1, 2, 3), "window": (0, 1, 2, 3), "linear": (), "delta": (), "hybrid": (3,)
    }  # fmt: skip
    assert len(recipe.seeds) == 3


def test_the_page_on_mixers_has_the_claims_of_its_recipe_with_the_verdicts_of_its_table() -> None:
    """Each claim is evaluated on the means in the table."""
    text = (FOLDER.parent / "docs" / "results" / "hybrid.md").read_text(encoding="utf-8")
    head, _, *body = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    means = [[cell.partition(" ±")[0].replace(" ", "") for cell in row] for row in body]
    table = {row[0]: {name: float(v) for name, v in zip(head[4:], row[4:], strict=True)} for row in means}
    claims = read_recipe(FOLDER / "hybrid.yaml").claims
    claim_lines = [line for line in text.splitlines() if line.startswith(("- seen (", "- not seen"))]
    for claim, line in zip(claims, claim_lines, strict=True):
        assert line.endswith(f": {claim.text} (`{claim.rule}`)")
        assert line.startswith("- seen (3 of 3") == claim.holds(table)


def test_row_47_one_recipe_goes_from_llama_to_llama_2() -> None:
    recipe = read_recipe(FOLDER / "evolution.yaml")
    tasks = [
        s.config(Path("x"), 0, None if s.source is None else Path("m")).task or "text" for s in recipe.stages
    ]
    assert [s.name for s in recipe.stages] == ["llama", "alpaca", "vicuna", "llama2", "llama2_chat"]
    assert tasks == ["text", "chat", "chat", "text", "chat"]
    assert [name for name, _ in recipe.stages[3].surgery] == ["gqa", "context"]
