"""The end of a run: when it comes, by the clock (so that what must still be done is done in time) or where nothing
better does; which of its models is the best by what is measured on held-out data; its model, its picture, and
its result."""

import math
import shlex
from pathlib import Path
from typing import Any

from headway.checkpoints.adapters import save_adapter
from headway.checkpoints.folder import load_folder
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.saving import save_folder
from headway.errors import ConfigError, check_known
from headway.models import cost
from headway.report import cell, no_pictures
from headway.train.callbacks import TrainResult
from headway.train.checkpoint import FINAL, State, checkpoints, read_record, step_of, take_mean
from headway.train.config import TrainConfig
from headway.train.evaluation import Evaluation
from headway.train.metrics import CURVE, METRICS, draw_curve, read_metrics
from headway.train.tasks.base import Task
from headway.train.trainer import Progress


def choose_weights(state: State) -> str:
    """Give the model the weights that the settings ask for, from checkpoints of the run: the best, or the mean of the
    last. Returns a sentence on them."""
    config, progress, out = state.config, state.progress, Path(state.config.out)
    if config.keep_best:
        if progress.best is None:
            return f"no evaluation found a finite {config.best_by}: the model is that of the last step"
        if progress.best_step < progress.step:
            path = out / f"checkpoint-{progress.best_step}"
            state.load_weights(path, read_record(path))
        return (
            f"the model is that of step {progress.best_step}: the best {config.best_by}, {progress.best:.4f}"
        )
    averaged = [path for path in checkpoints(out) if step_of(path) > 0][-config.average :]
    take_mean(state.task.model, averaged)
    return f"the model is the mean of {', '.join(path.name for path in averaged)}"


def leave_model(out: Path, task: Task[Any], trained: Any, progress: Progress) -> str | None:
    """Save what is trained (`Saver.trained`) in the folder `out`, of a frozen model the adapter as PEFT keeps it, and
    draw the curve; or say why it is not drawn."""
    how: dict[str, Any] = {"tokenizer": task.tokenizer, "generation": task.generation, "overwrite": True}
    if task.base is None:
        save_folder(out / FINAL, trained, **how)
    else:
        save_adapter(out / FINAL, trained, task.model.spec, base=task.base, **how)
    if (why := no_pictures()) is not None:
        return f"{CURVE} is not drawn: {why}"
    parameters = cost.parameter_count(task.model.spec)
    title = f"{cell(parameters)} parameters, {cell(progress.trained_tokens)} trained {task.unit}s"
    draw_curve(read_metrics(out / METRICS), out / CURVE, title, task.unit)
    return None


def result(
    out: Path, task: Task[Any], progress: Progress, record: dict[str, Any], validation: Evaluation | None
) -> TrainResult:
    """The result of the run. `record` is the last step's, empty where none was left to do."""
    model = out / FINAL
    return TrainResult(
        out=out,
        model=model,
        metrics=out / METRICS,
        curve=curve if (curve := out / CURVE).exists() else None,
        steps=progress.step,
        trained_tokens=progress.trained_tokens,
        seconds=progress.seconds,
        loss=record.get("loss"),
        validation=validation,
        next_command=task.next_command.format(model=shlex.quote(str(model))),
        accuracy=record.get("accuracy"),
        unit=task.unit,
        transformers=None if task.base is not None else transformers_verdict(load_folder(model).spec),
    )


LESS_IS_BETTER = ("loss", "bits_per_byte")
"""Beginnings of names of measures where less is better: loss, loss_turn_2, bits_per_byte@512. Else more is."""


def count(config: TrainConfig, progress: Progress, evaluation: Evaluation | None) -> bool:
    """Count an evaluation of the model after `progress.step` steps; returns whether it is better than all before. A
    measure that is not a finite number is not.

    With losses 3, 2, 2, 4 the best is the second, and two evaluations in a row brought nothing better (`waited`).

    Raises ConfigError where nothing is held out, and for a measure that the task does not have."""
    known = (
        {}
        if evaluation is None
        else {name.removeprefix("val_"): value for name, value in evaluation.record.items()}
    )
    name = config.best_by
    if not known:
        raise ConfigError(
            "keep_best and early_stopping_patience compare models on held-out data; nothing is held out"
        )
    check_known(name, known, "best_by: there is no measure", are="held-out data have")
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


EVALUATION = 0.5
"""Share of a step's time that evaluating as much data takes, at most: a third of its operations, and a margin."""
SAVES = 4
"""Saving at the end takes so many first checkpoints: moments are twice its weights, and the model is saved too."""


class Deadline:
    """`limit` seconds for all steps, the last evaluation and the last checkpoint; None is no limit.

    behind = steps held out x (seconds of a step) / 2 + 4 (seconds of the first checkpoint)

    held_steps    number of steps that read as much as is held out
    """

    def __init__(self, limit: float | None, held_steps: float) -> None:
        self.limit, self.held_steps = limit, held_steps
        self.steps, self.step_seconds, self.save_seconds = 0, 0.0, 0.0

    def count(self, seconds: float) -> None:
        """Counts a step that took so long."""
        self.steps, self.step_seconds = self.steps + 1, self.step_seconds + seconds

    @property
    def behind(self) -> float:
        """Seconds that the run takes after its last step, as far as is known."""
        return EVALUATION * self.held_steps * self.mean + SAVES * self.save_seconds

    @property
    def mean(self) -> float:
        """Seconds of a step."""
        return self.step_seconds / max(self.steps, 1)

    def is_over(self, seconds: float) -> bool:
        """Whether no further step fits, `seconds` after the first began."""
        return self.limit is not None and seconds + self.behind >= self.limit

    def left(self, seconds: float) -> float:
        """Seconds until the run is done."""
        return math.inf if self.limit is None else max(0.0, self.limit - seconds)

    def scheduled(self, seconds: float) -> float:
        """`seconds` on a clock that shows `limit` when the last step ends: what schedules go by."""
        if self.limit is None:
            return seconds
        return self.limit * min(1.0, seconds / max(self.limit - self.behind, 1e-9))
