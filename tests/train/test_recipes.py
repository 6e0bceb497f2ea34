"""Every shipped run file that trains on text is read without errors, and runs in toy size."""

from pathlib import Path
from typing import Any

import pytest

from headway.train import config_yaml, read_config, train
from headway.train.config_io import read_yaml
from headway.train.inputs import make_spec

# Recipes of several stages: tests/recipes/test_shipped.py. Other tasks than training on text: tests/train/test_*.py
RECIPES = [
    path
    for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    if "stages" not in (keys := read_yaml(path)) and keys.get("task") in (None, "causal-lm", "masked-lm")
]
TOY: dict[str, Any] = {
    "vocab": 300, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24, "depth": 2, "context": 64,
    "batch_tokens": 128, "micro_batch": None, "threads": 1, "eval_every": None, "save_every": None,
    "eval_tokens": None, "sample_tokens": 4,
}  # fmt: skip


def test_there_are_recipes() -> None:
    assert {"demo.yaml", "small.yaml", "llama.yaml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_understood(path: Path, tmp_path: Path) -> None:
    config = read_config(path)
    spec = make_spec(config, config.vocab or 4096)
    assert spec.trained_context == config.context
    (tmp_path / "again.yaml").write_text(config_yaml(config), encoding="utf-8")
    assert read_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_runs_in_toy_size(path: Path, corpus: Path, tmp_path: Path, steady_clock: None) -> None:
    config = read_config(path)
    length = {"max_seconds": 0.2} if config.max_seconds else {"steps": 2, "epochs": None}
    held = {"validation": str(corpus)} if config.validation else {}
    every = {"sample_every": 1} if config.sample_prompts else {}
    local = {"data": str(corpus), "out": str(tmp_path / "run"), "tokenizer": None}
    result = train(read_config(path, flags={**TOY, **length, **held, **every, **local}), quiet=True)
    assert result.loss is not None
    assert result.validation is not None
    assert result.steps >= 1 if config.max_seconds else result.steps == 2
