"""Training: settings, the training loop, tasks, evaluation. Importing this package does not import torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headway.train.config import TrainConfig as TrainConfig
from headway.train.config_io import config_yaml as config_yaml
from headway.train.config_io import read_config as read_config
from headway.train.rows_config import TextConfig as TextConfig

if TYPE_CHECKING:
    from headway.train.callbacks import Callback as Callback
    from headway.train.callbacks import CallbackContext as CallbackContext
    from headway.train.callbacks import Interrupted as Interrupted
    from headway.train.callbacks import TrainResult as TrainResult
    from headway.train.evaluation import Evaluation as Evaluation
    from headway.train.evaluation import evaluate as evaluate
    from headway.train.run import train as train
    from headway.train.tasks.base import Objective as Objective
    from headway.train.tasks.base import Sums as Sums
    from headway.train.tasks.base import Task as Task
    from headway.train.trainer import Trainer as Trainer
    from headway.train.trainer import TrainingError as TrainingError
    from headway.train.trainer import fit as fit

_HOMES = {
    "callbacks": "Callback CallbackContext Interrupted TrainResult",
    "evaluation": "Evaluation evaluate",
    "run": "train",
    "tasks.base": "Objective Sums Task",
    "trainer": "Trainer TrainingError fit",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["TextConfig", "TrainConfig", "config_yaml", "read_config", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"headway.train.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
