"""Which model of a run is the best by what is measured on held-out data, and when to stop looking for a better one."""

from __future__ import annotations

import math

from headway.errors import ConfigError, did_you_mean, listed
from headway.train.config import TrainConfig
from headway.train.evaluation import Evaluation
from headway.train.trainer import Progress

LESS_IS_BETTER = ("loss", "bits_per_byte")
"""How the names of measures begin of which this is so: loss, loss_turn_2, bits_per_byte@512. Of others, more is."""


def count(config: TrainConfig, progress: Progress, found: Evaluation | None) -> bool:
    """Count an evaluation of the model after `progress.step` steps; whether it is better than all before. A measure
    that is not a finite number is not.

    With losses 3, 2, 2, 4 the best is the second, and two evaluations in a row brought nothing better (`waited`).

    Raises ConfigError where nothing is held out, and for a measure that the task does not have."""
    known = (
        {} if found is None else {name.removeprefix("val_"): value for name, value in found.record.items()}
    )
    name = config.best_by
    if not known:
        raise ConfigError(
            "keep_best and early_stopping_patience compare models on held-out data; nothing is held out"
        )
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"best_by {name}: no such measure{hint}; held-out data have {listed([*known])}")
    value, best = known[name], progress.best
    less = name.startswith(LESS_IS_BETTER)
    better = math.isfinite(value) and (best is None or (value < best if less else value > best))
    progress.evaluated, progress.waited = progress.step, 0 if better else progress.waited + 1
    if better:
        progress.best, progress.best_step = value, progress.step
    return better


def waited_enough(config: TrainConfig, progress: Progress) -> bool:
    """Whether the run ends because nothing better has come for so long."""
    patience = config.early_stopping_patience
    return patience is not None and progress.waited >= patience
