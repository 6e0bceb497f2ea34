"""The end of a run: when it ends (by a time limit, which includes the final evaluation and save, or by early stopping);
which of its models is the best on held-out data; and its final model, curve and result."""

import math
import shlex
from pathlib import Path
from typing import Any

from headway.checkpoints.adapters import save_adapter
from headway.checkpoints.folder import FINAL, load_folder
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.saving import save_folder
from headway.errors import ConfigError, check_known
from headway.models import cost
from headway.report import cell, no_pictures
from headway.train.callbacks import TrainResult
from headway.train.checkpoint import State, checkpoints, read_record, step_of, take_mean
from headway.train.config import TrainConfig
from headway.train.evaluation import Evaluation
from headway.train.metrics import CURVE, METRICS, draw_curve, read_metrics
from headway.train.tasks.base import Task
from headway.train.trainer import Progress


def choose_weights(state: State) -> str:
    """Sets the model to the weights that the settings ask for: those of the best checkpoint, or the mean of the last
    ones. Returns a sentence that describes them."""
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
    """Saves the final model (`trained`, see `Saver.trained`) in the folder `out`; for a frozen model, the adapter in
    PEFT's format. Draws the curve; returns a remark if it cannot be drawn."""
    options: dict[str, Any] = {"tokenizer": task.tokenizer, "generation": task.generation, "overwrite": True}
    if task.base is None:
        save_folder(out / FINAL, trained, **options)
    else:
        save_adapter(out / FINAL, trained, task.model.spec, base=task.base, **options)
    if (reason := no_pictures()) is not None:
        return f"{CURVE} is not drawn: {reason}"
    parameters = cost.parameter_count(task.model.spec)
    title = f"{cell(parameters)} parameters, {cell(progress.trained_tokens)} trained {task.unit}s"
    draw_curve(read_metrics(out / METRICS), out / CURVE, title, task.unit)
    return None


def result(
    out: Path, task: Task[Any], progress: Progress, record: dict[str, Any], validation: Evaluation | None
) -> TrainResult:
    """Returns the result of the run. `record` is the last step's line of metrics; empty if no step was left to do."""
    folder = out / FINAL
    return TrainResult(
        out=out,
        model=folder,
        metrics=out / METRICS,
        curve=curve if (curve := out / CURVE).exists() else None,
        steps=progress.step,
        trained_tokens=progress.trained_tokens,
        seconds=progress.seconds,
        loss=record.get("loss"),
        validation=validation,
        next_command=task.next_command.format(model=shlex.quote(str(folder))),
        accuracy=record.get("accuracy"),
        unit=task.unit,
        transformers=None if task.base is not None else transformers_verdict(load_folder(folder).spec),
    )


LESS_IS_BETTER = ("loss", "bits_per_byte")
"""Prefixes of the measures of which lower is better: loss, loss_turn_2, bits_per_byte@512. Of others, higher is."""


def count(config: TrainConfig, progress: Progress, evaluation: Evaluation | None) -> bool:
    """Records an evaluation of the model after `progress.step` steps in `progress`; returns whether it is better than
    all before. A measure that is not finite is never better.

    Example: with losses 3, 2, 2, 4 the best is the second, and `waited` is 2 at the end.

    Raises ConfigError if nothing is held out, and for a measure that the task does not have."""
    measures = (
        {}
        if evaluation is None
        else {name.removeprefix("val_"): value for name, value in evaluation.record.items()}
    )
    name = config.best_by
    if not measures:
        raise ConfigError(
            "keep_best and early_stopping_patience need held-out data, and none is given; give validation data"
        )
    check_known(name, measures, "best_by: there is no measure", are="evaluations have")
    value, best = measures[name], progress.best
    less = name.startswith(LESS_IS_BETTER)
    better = math.isfinite(value) and (best is None or (value < best if less else value > best))
    progress.evaluated, progress.waited = progress.step, 0 if better else progress.waited + 1
    if better:
        progress.best, progress.best_step = value, progress.step
    return better


def waited_enough(config: TrainConfig, progress: Progress) -> bool:
    """Returns whether early stopping ends the run: the last `early_stopping_patience` evaluations were no better."""
    patience = config.early_stopping_patience
    return patience is not None and progress.waited >= patience


EVALUATION = 0.5
"""Bound on the time of evaluating as much data as a step reads, as a share of the step's time: the forward pass is a
third of its operations, and there is a margin."""
SAVES = 4
"""Bound on the time of saving at the end, in units of the first checkpoint's: 1 for its weights, 2 for the optimizer
state, which a new run's first checkpoint does not have, and 1 for the final model."""


class Deadline:
    """A time limit, in seconds, for all steps, the last evaluation and the last save together; None is no limit. The
    time needed after the last step is estimated as

        behind = held_steps x (mean seconds of a step) / 2 + 4 (seconds of the first checkpoint)

    held_steps    number of steps that read as much data as an evaluation of all held-out data
    """

    def __init__(self, limit: float | None, held_steps: float) -> None:
        self.limit, self.held_steps = limit, held_steps
        self.steps, self.step_seconds, self.save_seconds = 0, 0.0, 0.0

    def count(self, seconds: float) -> None:
        """Records the duration of a step."""
        self.steps, self.step_seconds = self.steps + 1, self.step_seconds + seconds

    @property
    def behind(self) -> float:
        """Estimated seconds of the evaluation and save after the last step."""
        return EVALUATION * self.held_steps * self.mean + SAVES * self.save_seconds

    @property
    def mean(self) -> float:
        """Mean seconds of a step; 0 before the first one."""
        return self.step_seconds / max(self.steps, 1)

    def is_over(self, seconds: float) -> bool:
        """Returns whether the steps must end, `seconds` after the first began, so that the rest fits into the limit."""
        return self.limit is not None and seconds + self.behind >= self.limit

    def left(self, seconds: float) -> float:
        """Returns the seconds that are left of the limit, `seconds` after the first step began."""
        return math.inf if self.limit is None else max(0.0, self.limit - seconds)

    def scheduled(self, seconds: float) -> float:
        """Returns the time, in seconds, that the learning rate schedule is given: `seconds` scaled so that it reaches
        `limit` when the last step ends, since the time `behind` it is no part of the schedule."""
        if self.limit is None:
            return seconds
        return self.limit * min(1.0, seconds / max(self.limit - self.behind, 1e-9))
