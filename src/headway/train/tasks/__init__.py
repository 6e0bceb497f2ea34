"""The table of tasks. A task is a class with an entry here; a task of your own is named MODULE:CLASS and needs none.

Importing this package does not import torch; finding a task does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, as_error, check_known
from headway.train.config import TrainConfig
from headway.train.rows_config import TextConfig

if TYPE_CHECKING:
    from headway.models import ModelSpec
    from headway.train.tasks.base import Task

TASKS = {
    "causal-lm": "headway.train.tasks.text:CausalLM",
    "masked-lm": "headway.train.tasks.text:MaskedLM",
    "translation": "headway.train.tasks.translation:Translation",
    "chat": "headway.train.tasks.chat:Chat",
    "preference": "headway.train.tasks.preference:PreferenceTuning",
    "classify": "headway.train.tasks.labels:Classify",
    "tag": "headway.train.tasks.labels:Tag",
    "answer": "headway.train.tasks.answer:Answer",
    "embed": "headway.train.tasks.embed:Embed",
}


def find_task(name: str) -> "type[Task[Any]]":
    """Returns the task with a name of the table, or of MODULE:CLASS. Raises ConfigError if there is none."""
    if ":" not in name:
        check_known(name, (*TASKS, "MODULE:CLASS for one of your own"), "there is no task")
    module, _, attribute = TASKS.get(name, name).partition(":")
    from headway.train.tasks.base import Task

    with as_error(ConfigError, f"task {name} cannot be imported", ImportError, AttributeError):
        task = getattr(import_module(module), attribute)
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise ConfigError(f"task {name} is not a subclass of headway.train.Task")
    return task


def text_task_of(spec: "ModelSpec") -> str:
    """Returns the task that trains a model of this spec on text alone. Raises ConfigError if none does."""
    tasks = {name: find_task(name) for name in TASKS}
    reasons = {name: task.unsupported(spec) for name, task in tasks.items() if task.settings is TextConfig}
    for name, reason in reasons.items():
        if reason is None:
            return name
    problems = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ConfigError(f"no task trains this model ({spec.family}) on text alone. {problems}")


def task_of(spec: "ModelSpec") -> str:
    """Returns the task that a model of this spec was trained for, as far as the spec shows: that of its head, else the
    task that trains it on text. Raises as `text_task_of`."""
    return spec.task if spec.task in TASKS else text_task_of(spec)


def settings_of(name: str | None) -> type[TrainConfig]:
    """Returns the settings class of a task; for None, that of training on text."""
    return TextConfig if name is None else find_task(str(name)).settings


def tasks_with(key: str) -> list[str]:
    """Returns the tasks of the table that have a setting of this name."""
    return [name for name in TASKS if key in find_task(name).settings.model_fields]
