"""Training of decoders and encoders on text: settings, loop, evaluation. Importing this imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.train.config import TrainConfig
from headway.train.config_io import config_yaml, read_config

if TYPE_CHECKING:
    from headway.train.callbacks import CallbackContext, Interrupted, PeriodicCallback, TrainResult
    from headway.train.evaluation import Evaluation, evaluate
    from headway.train.loop import train
    from headway.train.step import TrainingError

_LATER = {
    "Evaluation": "evaluation",
    "evaluate": "evaluation",
    "PeriodicCallback": "callbacks",
    "Interrupted": "callbacks",
    "CallbackContext": "callbacks",
    "TrainResult": "callbacks",
    "train": "loop",
    "TrainingError": "step",
}

__all__ = [
    "CallbackContext",
    "Evaluation",
    "Interrupted",
    "PeriodicCallback",
    "TrainConfig",
    "TrainResult",
    "TrainingError",
    "config_yaml",
    "evaluate",
    "read_config",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        value = getattr(import_module(f"headway.train.{_LATER[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
