"""Training of decoders and encoders on text: settings, loop, evaluation. Importing this imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.train.config import TrainConfig
from headway.train.config_io import config_yaml, read_config
from headway.train.rows_config import TextConfig

if TYPE_CHECKING:
    from headway.train.callbacks import Callback, CallbackContext, Interrupted, TrainResult
    from headway.train.evaluation import Evaluation, evaluate
    from headway.train.run import train
    from headway.train.tasks.base import Objective, Sums, Task
    from headway.train.trainer import Trainer, TrainingError, fit

_LATER = {
    "callbacks": ("Callback", "CallbackContext", "Interrupted", "TrainResult"),
    "evaluation": ("Evaluation", "evaluate"),
    "run": ("train",),
    "tasks.base": ("Objective", "Sums", "Task"),
    "trainer": ("Trainer", "TrainingError", "fit"),
}

__all__ = [
    "Callback",
    "CallbackContext",
    "Evaluation",
    "Interrupted",
    "Objective",
    "Sums",
    "Task",
    "TextConfig",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "TrainingError",
    "config_yaml",
    "evaluate",
    "fit",
    "read_config",
    "train",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"headway.train.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
