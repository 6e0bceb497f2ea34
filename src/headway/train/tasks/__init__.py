"""The table of tasks: a task is one file and one row here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.models import ModelSpec
    from headway.train.settings import Settings
    from headway.train.tasks.base import Task

TASKS = {
    "causal-lm": "headway.train.tasks.causal_lm:CausalLM",
    "masked-lm": "headway.train.tasks.masked_lm:MaskedLM",
    "translation": "headway.train.tasks.translation:Translation",
}


def find_task(name: str) -> type[Task[Any, Any]]:
    """The task of a name of the table."""
    module, _, attribute = TASKS[name].partition(":")
    task: type[Task[Any, Any]] = getattr(import_module(module), attribute)
    return task


def task_of(config: Settings) -> type[Task[Any, Any]]:
    """The task whose settings these are."""
    if config.command == "train-translation":
        return find_task("translation")
    from headway.train.inputs import model_spec

    asked = getattr(config, "objective", None)
    names = {"next-token": "causal-lm", "masked-lm": "masked-lm"}
    return find_task(names[asked]) if asked else text_task(model_spec(config))  # type: ignore[arg-type]


def text_task(spec: ModelSpec) -> type[Any]:
    """What trains a model of this spec on text alone. Raises ConfigError where nothing does."""
    if spec.encoder is not None:
        raise ConfigError(
            f"this is an encoder-decoder ({spec.family}), which is trained on pairs of texts; text alone trains "
            "decoders (next-token) and encoders (masked-lm)"
        )
    return find_task("causal-lm" if spec.causal else "masked-lm")
