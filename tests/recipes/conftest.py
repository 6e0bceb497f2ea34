"""Fixtures: a recipe of five runs that takes about a second."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.recipes import Recipe, read_recipe
from tests.train.conftest import _no_measuring, corpus, steady_clock  # noqa: F401

BASE: dict[str, Any] = {
    "validation_share": 0.2, "vocab": 300, "width": 16, "heads": 4, "kv_heads": 4, "hidden": 24, "depth": 2,
    "context": 24, "batch_tokens": 96, "micro_batch": 2, "steps": 4, "dtype": "fp32", "workers": 1,
    "save_every": 2, "eval_at_start": True,
}  # fmt: skip
STAGES: list[dict[str, Any]] = [
    {"name": "mha"},
    {"name": "mean", "surgery": {"gqa": 2}, "moments": "keep"},
    {"name": "random", "from": "mha", "surgery": {"gqa": {"kv_heads": 2, "pool": "random"}}, "moments": "keep"},
    {"name": "long", "from": "mean", "context": 48, "surgery": {"context": {"tokens": 48, "method": "linear"}}},
    {"name": "window", "from": "long", "surgery": {"patterns": "Window.last(8); Causal()"}, "steps": 3},
]  # fmt: skip


@pytest.fixture
def make(tmp_path: Path, corpus: Path) -> Callable[..., Recipe]:  # noqa: F811
    """Returns a function that makes a recipe, given the name of its output folder and other keys of its file."""

    def made(out: str, stages: Any = STAGES, *, small: bool = False, toy: Any = None, **keys: Any) -> Recipe:
        file = tmp_path / "recipe.yaml"
        content = {
            **BASE,
            "data": str(corpus),
            "out": str(tmp_path / out),
            "stages": stages,
            "small": toy or {},
            **keys,
        }
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return read_recipe(file, small=small)

    return made
