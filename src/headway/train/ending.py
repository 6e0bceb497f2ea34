"""The end of a run: its model, its picture, and what is said of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from headway.checkpoints.folder import load_folder
from headway.checkpoints.hf.config import transformers_verdict
from headway.models import cost
from headway.report import cell
from headway.train.callbacks import TrainResult
from headway.train.checkpoint import FINAL, State, checkpoints, save_final, step_of, take_mean
from headway.train.evaluation import Evaluation
from headway.train.metrics import CURVE, METRICS, draw_curve, read_metrics
from headway.train.record import read_record
from headway.train.tasks.base import Task
from headway.train.trainer import Progress


def choose_weights(state: State) -> str:
    """Give the model the weights that the settings ask for, from checkpoints of the run: the best, or the mean of the
    last. What is said of it."""
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
    kept = [path for path in checkpoints(out) if step_of(path) > 0][-config.average :]
    take_mean(state.task.model, kept)
    return f"the model is the mean of {', '.join(path.name for path in kept)}"


def leave_model(out: Path, task: Task[Any], trained: Any, progress: Progress) -> None:
    """Save what is trained (`Saver.trained`) in the folder `out`, and draw the curve."""
    save_final(out / FINAL, task, trained)
    parameters = cost.parameter_count(task.model.spec)
    title = f"{cell(parameters)} parameters, {cell(progress.trained_tokens)} trained {task.unit}s"
    draw_curve(read_metrics(out / METRICS), out / CURVE, title, task.unit)


def result(
    out: Path, task: Task[Any], progress: Progress, record: dict[str, Any], validation: Evaluation | None
) -> TrainResult:
    """What the run left behind. `record` is the last step's, empty where none was left to do."""
    model = out / FINAL
    return TrainResult(
        out=out,
        model=model,
        metrics=out / METRICS,
        curve=out / CURVE,
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
