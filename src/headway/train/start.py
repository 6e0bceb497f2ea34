"""The start of a run: its task, torch's seed and threads, disk space; the checkpoint to resume from, and the command
that resumes a run."""

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway.attention.select import AUTO, named
from headway.data.datasets import made_by
from headway.errors import ConfigError
from headway.models.expert_parallel import check_experts
from headway.parallel import Mesh
from headway.report import size
from headway.storage import disk
from headway.train.checkpoint import (
    CONFIG,
    MOMENTS,
    State,
    changes,
    checkpoints,
    read_record,
    state_tensors,
    step_of,
)
from headway.train.config import TrainConfig
from headway.train.inputs import Inputs
from headway.train.metrics import METRICS
from headway.train.microbatch_pool import choose_precision
from headway.train.rows_config import TextConfig
from headway.train.tasks import find_task, text_task_of
from headway.train.tasks.base import Task
from headway.train.trackers import check_trackers


def checked(config: TrainConfig, ranks: int) -> Task[Any]:
    """Returns the task of a run of `ranks` processes (by default the text task that trains the model), after checking
    all that is known before data is read: files, backend, packages of trackers, precision, mesh, model.

    Raises ConfigError for missing files (all in one error), for settings that do not fit together or belong to another
    task, and for a model that no task trains; BackendError for an unknown backend."""
    if missing := config.missing(made_by):
        raise ConfigError(f"{'; '.join(missing)}. Paths are relative to {Path.cwd()}")
    inputs = Inputs.of(config)
    of_model = config.task is None and isinstance(config, TextConfig)
    name = text_task_of(inputs.spec()) if of_model else str(config.task)
    task_class = find_task(name)
    if not isinstance(config, task_class.settings):
        raise ConfigError(
            f"task {name} has settings of the class {task_class.settings.__name__}, got {type(config).__name__}"
        )
    if config.backend != AUTO:
        named(config.backend)
    check_trackers(config)
    if (mesh := Mesh.of(config.mesh, ranks)).expert > 1:
        check_experts(inputs.spec(), mesh.expert)
    task = task_class(replace(inputs, config=inputs.config.model_copy(update={"task": name})))
    choose_precision(config.dtype)
    task.check_settings()
    return task


@contextmanager
def seeded(seed: int, threads: int | None) -> Iterator[None]:
    """Seeds torch's random generator and sets its CPU threads while open; both are restored afterwards. Dropout is
    seeded by `Trainer` for each step."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            torch.set_num_threads(threads or before)
            yield
        finally:
            torch.set_num_threads(before)


def check_room(task: Task[Any]) -> None:
    """Raises ConfigError if the disk has no room for the checkpoints of a run and for its final model.

    A checkpoint has the weights in float32 and, with AdamW, two moments for each trained weight: 12 bytes. With an
    adapter, only the adapter's weights count. There is one checkpoint more than `keep_last`, since the oldest is
    removed after the next one is written, and the best one may be kept besides."""
    config, weights = task.config, list(task.model.parameters())
    out = Path(config.out)
    trained = [p for p in weights if p.requires_grad]
    model_bytes = sum(p.nbytes for p in (weights if task.base is None else trained))
    each = model_bytes + 2 * sum(p.nbytes for p in trained)
    if config.save_every is None and not config.keep_best:
        total: float = 2
    else:
        interval = min(
            every for every in (config.save_every, config.keep_best and config.eval_every) if every
        )
        total = math.inf if task.steps is None else 2 + task.steps // interval
    count = max(0, int(min(config.keep_last + 1 + config.keep_best, total)) - len(checkpoints(out)))
    needed, free = count * each + model_bytes, disk.free(out)
    if needed > free:
        raise ConfigError(
            f"{out}: this run writes {size(needed)} ({count} checkpoints of {size(each)} and its model), but the disk "
            f"has {size(free)} free; make room, keep fewer checkpoints (--keep-last), or choose a folder on another "
            "disk with --out"
        )


def take_up(state: State, start: Path | None, say: Callable[[str], None]) -> None:
    """Loads a run's state from the checkpoint `start`, or its optimizer state from the `moments` of the settings, and
    reports it by `say`.

    Raises what `State.load` does, and ConfigError if the checkpoint has more steps than the run."""
    config, steps = state.config, state.task.steps
    if start is not None:
        for remark in state.load(start):
            say(f"not bit for bit the same run: {remark}")
        done = state.progress.step
        if steps is not None and done > steps:
            raise ConfigError(
                f"{start} has done {done} steps, but this run has only {steps}; give more steps, or resume from an "
                "earlier checkpoint with --resume PATH (resume=PATH)"
            )
        say(f"going on from {start}: step {done}")
    elif config.moments is not None:
        moments, count = state_tensors(Path(config.moments), MOMENTS), len(state.optimizer.parameters)
        loaded = state.optimizer.load_state_tensors(moments, strict=False)
        say(f"moments of {loaded} of {count} parameters from {config.moments}; the others begin with zeros")


OF_MODELS = ("config.json", "adapter_config.json")


def resume_command(out: Path, ranks: int) -> str:
    """Returns the command that resumes a run with this number of processes."""
    several = f"--processes {ranks} " if ranks > 1 else ""
    return f"headway train {several}--config {shlex.quote(str(out / CONFIG))} --resume auto"


def how_to_resume(out: Path, step: int, ranks: int) -> str:
    """Returns a text on how to resume a run of `ranks` processes that stopped at `step` because of an error."""
    existing = checkpoints(out)
    how = f"resume from {existing[-1]}: {resume_command(out, ranks)}" if existing else "start again"
    return f"The run stopped at step {step}; when the cause is fixed, {how}"


def where_to_begin(config: TrainConfig, resume: str) -> Path | None:
    """Returns the checkpoint to resume from, None to begin; `resume` as in `train`.

    Raises ConfigError if the folder holds another run, a model, or checkpoints that are later than the chosen one or
    come from elsewhere, and for settings that do not match the checkpoint."""
    out = Path(config.out)
    existing = checkpoints(out)
    if (
        not existing
        and not (out / CONFIG).exists()
        and (model := next(filter(Path.exists, map(out.joinpath, OF_MODELS)), None))
    ):
        raise ConfigError(
            f"{out} holds a model ({model.name}), and a run would mix its files with the model's; choose another "
            "folder with --out (out=...)"
        )
    if resume == "never":
        if existing or (out / CONFIG).exists() or (out / METRICS).exists():
            what = f"a run ({existing[-1].name})" if existing else "a run without a checkpoint"
            raise ConfigError(
                f'{out} already holds {what}; resume it with --resume auto (resume="auto"), or choose another folder '
                "with --out (out=...)"
            )
        return None
    if resume == "auto" and not existing:
        return None
    start = existing[-1] if resume == "auto" else Path(resume)
    record = read_record(start)
    changes(record, config, start)
    here = start.resolve().parent == out.resolve()
    later = [p.name for p in existing if not here or step_of(p) > record["step"]]
    if later:
        raise ConfigError(
            f"{out} holds {', '.join(later)}, which {'go beyond' if here else 'do not come from'} {start}; choose "
            "another folder with --out, or remove them"
        )
    return start
