"""What a recipe's file may contain, and which source of a setting wins."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.errors import ConfigError
from headway.recipes import Recipe, read_recipe

Make = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("stages", "keys", "said"),
    [
        ([], {}, "stages must be a list of one or more mappings"),
        ([{"name": "a b"}], {}, "its own name of letters"),
        ([{"name": "a"}, {"name": "a"}], {}, "its own name"),
        ([{"name": "a"}, {"name": "b", "from": "c"}], {}, "from: there is no earlier stage 'c'"),
        ([{"name": "a", "surgery": {"gqa": 2}}], {}, "need the model of an earlier stage"),
        ([{"name": "a", "moments": "keep"}], {}, "need the model of an earlier stage"),
        ([{"name": "a"}, {"name": "b", "moments": "maybe"}], {}, "there are no moments 'maybe'; there are keep, zero"),
        ([{"name": "a"}, {"name": "b", "surgery": {"gqq": 2}}], {}, "there is no operation 'gqq' (did you mean"),
        ([{"name": "a"}, {"name": "b", "surgery": {"gqa": {"heads": 2}}}], {}, "gqa has no option 'heads'"),
        ([{"name": "a"}, {"name": "b", "surgery": {"window": {"sinks": 2}}}], {}, "window needs keys"),
        ([{"name": "a", "stepz": 3}], {}, 'unknown setting "stepz"'),
        ([{"name": "a"}], {"stepz": 3}, "no stage has a setting stepz"),
        ([{"name": "a"}, {"name": "b", "depth": 3}], {}, "already fixes depth"),
        ([{"name": "a"}], {"claims": {"c": "a.val_loss"}}, "must be a comparison with <"),
        ([{"name": "a"}], {"claims": {"c": "b.val_loss < 1"}}, "there is no stage 'b'"),
        ([{"name": "a"}], {"claims": {"c": "a. < 1"}}, "is not a comparison"),
        ([{"name": "a"}], {"claims": ["a.val_loss < 1"]}, "claims must be a mapping, got ['a.val_loss < 1']"),
        ([{"name": "a"}], {"columns": "val_loss"}, "columns must be a list, got 'val_loss'"),
        ([{"name": "a"}], {"seeds": 3}, "seeds must be a list, got 3"),
        ([{"name": "a", "published": [1.7]}], {}, "stage a: published must be a mapping"),
        ([{"name": "a", "small": 2}], {}, "stage a: small must be a mapping"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(
    make: Make, tmp_path: Path, stages: list[Any], keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make("out", stages, **keys)
    assert not (tmp_path / "out").exists()


def test_later_words_win(make: Make, tmp_path: Path) -> None:
    stages = [
        {"name": "a", "steps": 7, "lr": 0.1, "small": {"lr": 0.3}},
        {"name": "b", "task": "masked-lm", "from": None, "family": "bert", "mask_share": 0.2},
    ]
    keys = {"mask_share": 0.3, "toy": {"steps": 2, "lr": 0.2}, "kv_heads": None, "heads": 2}
    full, small = make("out", stages, **keys), make("out", stages, small=True, **keys)
    assert [s.settings["steps"] for s in full.stages] == [7, 4]
    assert [s.settings["steps"] for s in small.stages] == [2, 2]
    assert [s.settings.get("lr") for s in small.stages] == [0.3, 0.2]
    assert [s.settings["mask_share"] for s in full.stages] == [0.3, 0.2]
    overridden = read_recipe(
        tmp_path / "recipe.yaml", ["steps=9", "b.steps=5", "out=x"], {"lr": 1.0}, small=True
    )
    assert [s.settings["steps"] for s in overridden.stages] == [9, 5]
    assert {s.settings["lr"] for s in overridden.stages} == {1.0}
    assert overridden.out == Path("x")
    with pytest.raises(ConfigError, match="there is no stage 'c'"):
        read_recipe(tmp_path / "recipe.yaml", ["c.steps=5"])


def test_the_task_of_all_stages_says_what_may_be_set(make: Make) -> None:
    keys = {"task": "masked-lm", "family": "bert", "kv_heads": None, "toy": {"mask_share": 0.4}}
    assert make("out", [{"name": "a"}], small=True, **keys).stages[0].settings["mask_share"] == 0.4
    with pytest.raises(
        ConfigError, match=r"no stage has a setting mask_shore.*mask_share.*their tasks: masked-lm"
    ):
        make("out", [{"name": "a"}], **{**keys, "toy": {"mask_shore": 0.4}}, small=True)


def test_the_command_runs_it(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(
        "out",
        [{"name": "one"}, {"name": "two", "steps": 2}],
        claims={"it learns": "two.val_loss < one.start_loss"},
    )
    file = str(tmp_path / "recipe.yaml")
    assert run(["train", "--config", file]) == 0
    out, err = capsys.readouterr()
    assert "--- stage 2 of 2: two" in err
    assert "causal-lm from one" in out
    assert "one seed, it holds: it learns" in out
    assert run(["train", "--config", file]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert run(["train", "--config", file, "--dry-run"]) == 1
    assert "a recipe of several runs" in capsys.readouterr().err
    assert run(["train", "--config", file, "--small", "--out", str(tmp_path / "x")]) == 0


@pytest.mark.parametrize(
    ("stages", "given", "said"),
    [
        ([{"name": "a", "seed": 3}], [], "seed belongs to the whole recipe"),
        ([{"name": "a"}], ["a.out=x"], "out belongs to the whole recipe"),
        ([{"name": "a"}, {"name": "b", "from": "a", "model": "m"}], [], "model is that of stage a"),
        ([{"name": "a"}], ["a.stepz=3"], "stage a: no stage has a setting stepz"),
        ([{"name": "a", "small": {"stepz": 3}}], [], "stage a: no stage has a setting stepz"),
        ([{"name": "a"}], ["seed=3", "seeds=[1, 2]"], "seed 3 and seeds [1, 2] are given"),
        ([{"name": "a"}], ["test_source=x"], "test_source and test_target belong together"),
        ([{"name": "a"}], ["test_source=x", "test_target=y"], "are for translators, but no stage trains one"),
    ],
)
def test_what_would_be_ignored_is_an_error(
    tmp_path: Path, stages: list[Any], given: list[str], said: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps({"data": "x", "stages": stages}), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_recipe(tmp_path / "recipe.yaml", given)


def test_a_seed_is_the_seed_of_every_stage(make: Make, tmp_path: Path) -> None:
    make("out", [{"name": "a"}])
    assert read_recipe(tmp_path / "recipe.yaml", [], {"seed": 3}).seeds == (3,)
    assert (
        read_recipe(tmp_path / "recipe.yaml", defaults={"threads": "1"}).stages[0].settings["threads"] == "1"
    )
    (tmp_path / "plain.yaml").write_text("stages: [{name: a, data: x}]", encoding="utf-8")
    with pytest.raises(ConfigError, match="--small needs settings under `small:`"):
        read_recipe(tmp_path / "plain.yaml", small=True)
