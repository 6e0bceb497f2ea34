"""Training of decoders and encoders on text: settings, loop, evaluation. Importing this imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.train.config import TrainConfig
from headway.train.config_io import config_yaml, read_config
from headway.train.text_config import TextConfig

if TYPE_CHECKING:
    from headway.train.callbacks import Callback, CallbackContext, Interrupted, TrainResult
    from headway.train.evaluation import Evaluation, TextEvaluation, evaluate
    from headway.train.run import train
    from headway.train.tasks.base import Objective, Sums, Task
    from headway.train.trainer import Trainer, TrainingError, fit

_LATER = {
    "Callback": "callbacks",
    "CallbackContext": "callbacks",
    "Evaluation": "evaluation",
    "Interrupted": "callbacks",
    "Objective": "tasks.base",
    "Sums": "tasks.base",
    "Task": "tasks.base",
    "TextEvaluation": "evaluation",
    "TrainResult": "callbacks",
    "Trainer": "trainer",
    "TrainingError": "trainer",
    "evaluate": "evaluation",
    "fit": "trainer",
    "train": "run",
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
    "TextEvaluation",
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
    if name in _LATER:
        value = getattr(import_module(f"headway.train.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
