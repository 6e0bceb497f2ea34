"""A trained model measured as its training measures held-out data: `headway eval MODEL --task TASK`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import ConfigError, did_you_mean
from headway.models import ModelSpec
from headway.train.config import TrainConfig
from headway.train.rows_config import PackedConfig
from headway.train.tasks import find_task

LONGEST = 2048


def measuring_settings(name: str, spec: ModelSpec, values: Mapping[str, Any]) -> TrainConfig:
    """The settings by which a task measures a model of this spec: `values`, rows as long as those that it was
    trained on unless they say another length (packed ones up to `LONGEST` tokens), and the usual ones.

    Raises ConfigError for a model that the task does not measure, for values that are about training alone, and as
    `TrainConfig.of`."""
    task = find_task(name)
    if (reason := task.unsupported(spec)) is not None:
        raise ConfigError(
            f"task {name} was asked for, but {reason}; leave --task out, or choose another model"
        )
    known, limit = task.measured_by, spec.context_limit
    for key in values:
        if known and key not in known:
            raise ConfigError(
                f"{key}: eval measures a model of task {name} by {', '.join(known)}{did_you_mean(key, known)}"
            )
    most = min(spec.trained_context, limit or spec.trained_context)
    if issubclass(task.settings, PackedConfig):  # whose rows are as long as they may be
        most = min(most, LONGEST)
    usual = {"context": most} if "context" in known else {}
    together: dict[str, Any] = {"task": name, **usual, **values}
    length = together.get("context")
    if limit is not None and isinstance(length, int) and length > limit:
        raise ConfigError(f"context {length} is more than the {limit} tokens that this model can take")
    if length is not None and "batch_tokens" in task.settings.model_fields:
        together["batch_tokens"] = max(length, task.settings.model_fields["batch_tokens"].default)
    return task.settings.of(together)
