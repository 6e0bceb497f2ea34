"""A stand-in for lm-evaluation-harness, under the same module names, and a small model for it to evaluate."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import headway.integrations
from headway.api import LanguageModel
from headway.models import Decoder
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import TURNS, with_template


class TemplateLM:
    """The part of the harness's base class that our model uses."""

    def __init__(self) -> None:
        self.partial: list[tuple[str, Any, Any]] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *facts: self.partial.append(facts))


def normalize_gen_kwargs(arguments: dict[str, Any], default: int) -> dict[str, Any]:
    """Like the harness's own: the number of new tokens is always called max_gen_toks."""
    return {"max_gen_toks": default, **arguments}


class TaskManager:
    def __init__(self, include_path: str | None = None) -> None:
        self.folder = include_path

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith("own") and self.folder == "tasks"]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields our module, which imports the stand-in; `registered` and `asked` hold what it registers and requests."""
    registered: dict[str, type] = {}
    asked: dict[str, Any] = {}

    def register_model(name: str) -> Any:
        return lambda kind: registered.setdefault(name, kind)

    def simple_evaluate(model: Any, **how: Any) -> dict[str, Any]:
        asked.update(model=model, **how)
        values = {
            "alias": "own",
            "acc,none": 0.25,
            "acc_stderr,none": 0.125,
            "f1,strict": 0.5,
            "f1_stderr,strict": 0.75,
        }
        return {
            "results": {"own": values},
            "n-samples": {"own": {"original": 9, "effective": 7}},
            "config": {},
        }

    names = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.models": {},
        "lm_eval.models.utils": {"normalize_gen_kwargs": normalize_gen_kwargs},
        "lm_eval.tasks": {"TaskManager": TaskManager},
    }
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ours = "headway.integrations.lm_eval"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    module = importlib.import_module(ours)
    module.registered, module.asked = registered, asked  # type: ignore[attr-defined]
    yield module
    sys.modules.pop(ours, None)
    vars(headway.integrations).pop("lm_eval", None)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return small()


@pytest.fixture
def lm(decoder: Decoder) -> LanguageModel:
    return LanguageModel(decoder, with_template(byte_level(), TURNS))
