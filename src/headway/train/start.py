"""Before a run: the task of its settings, torch's seed and threads, room on the disk; where a run goes on, and the
command for that."""

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
    """The task of a run of so many processes, the one that the model is for unless the settings name one, after checks
    of all that is known before data is read: files, backend, the packages of trackers, precision, mesh, model.

    Raises ConfigError for what is missing, all files at once, for what does not fit, for settings of another task, and
    for a model that nothing trains; BackendError for a backend that there is not."""
    if missing := config.missing(made_by):
        raise ConfigError(f"{'; '.join(missing)}. Paths are relative to {Path.cwd()}")
    inputs = Inputs.of(config)
    of_model = config.task is None and isinstance(config, TextConfig)
    name = text_task_of(inputs.spec()) if of_model else str(config.task)
    kind = find_task(name)
    if not isinstance(config, kind.settings):
        raise ConfigError(
            f"task {name} has settings of the class {kind.settings.__name__}, got {type(config).__name__}"
        )
    if config.backend != AUTO:
        named(config.backend)
    check_trackers(config)
    if (mesh := Mesh.of(config.mesh, ranks)).expert > 1:
        check_experts(inputs.spec(), mesh.expert)
    task = kind(replace(inputs, config=inputs.config.model_copy(update={"task": name})))
    choose_precision(config.dtype)
    task.check_settings()
    return task


@contextmanager
def seeded(seed: int, threads: int | None) -> Iterator[None]:
    """While open, torch draws from `seed` (dropout by the step besides: `Trainer`) on `threads` CPU threads."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            torch.set_num_threads(threads or before)
            yield
        finally:
            torch.set_num_threads(before)


def check_room(task: Task[Any]) -> None:
    """Raise ConfigError where the disk has no room for the checkpoints of a run and for its model.

    A checkpoint has the weights in float32, and with AdamW two moments for each that is trained: 12 bytes, of an
    adapter of its own numbers alone. The oldest of `keep_last` goes when the next one is there, and the
    best may be kept besides."""
    config, weights = task.config, list(task.model.parameters())
    out = Path(config.out)
    trained = [p for p in weights if p.requires_grad]
    model = sum(p.nbytes for p in (weights if task.base is None else trained))
    each = model + 2 * sum(p.nbytes for p in trained)
    if config.save_every is None and not config.keep_best:
        ever: float = 2
    else:
        often = min(every for every in (config.save_every, config.keep_best and config.eval_every) if every)
        ever = math.inf if task.steps is None else 2 + task.steps // often
    count = max(0, int(min(config.keep_last + 1 + config.keep_best, ever)) - len(checkpoints(out)))
    needed, free = count * each + model, disk.free(out)
    if needed > free:
        raise ConfigError(
            f"{out}: this run writes {size(needed)} ({count} checkpoints of {size(each)} and its model), and the disk "
            f"has {size(free)} free; make room, keep fewer checkpoints (--keep-last), or choose a folder on another "
            "disk with --out"
        )


def take_up(state: State, start: Path | None, say: Callable[[str], None]) -> None:
    """Fill a run's state from the checkpoint `start`, or from the moments that its settings name, and say so.

    Raises what `State.load` does, and ConfigError for a run that has done more steps than it is to have."""
    config, steps = state.config, state.task.steps
    if start is not None:
        for remark in state.load(start):
            say(f"not bit for bit the same run: {remark}")
        done = state.progress.step
        if steps is not None and done > steps:
            raise ConfigError(
                f"{start} has done {done} steps, and the run is to have {steps}; give more steps, or go on "
                "from an earlier checkpoint with --resume PATH (resume=PATH)"
            )
        say(f"going on from {start}: step {done}")
    elif config.moments is not None:
        moments, count = state_tensors(Path(config.moments), MOMENTS), len(state.optimizer.parameters)
        taken = state.optimizer.load_state_tensors(moments, strict=False)
        say(f"moments of {taken} of {count} parameters from {config.moments}; the others begin with zeros")


OF_MODELS = ("config.json", "adapter_config.json")


def resume_command(out: Path, ranks: int) -> str:
    """The command that goes on with a run of so many processes."""
    several = f"--processes {ranks} " if ranks > 1 else ""
    return f"headway train {several}--config {shlex.quote(str(out / CONFIG))} --resume auto"


def how_to_resume(out: Path, step: int, ranks: int) -> str:
    """The text on how to go on with a run of so many processes that stopped because something could not be written."""
    existing = checkpoints(out)
    how = f"resume from {existing[-1]}: {resume_command(out, ranks)}" if existing else "start again"
    return f"The run stopped at step {step}; when that is mended, {how}"


def where_to_begin(config: TrainConfig, resume: str) -> Path | None:
    """The checkpoint to resume from, None to begin; see `train`. ConfigError where histories would be mixed, and for
    settings that the checkpoint does not fit."""
    out = Path(config.out)
    existing = checkpoints(out)
    if (
        not existing
        and not (out / CONFIG).exists()
        and (model := next(filter(Path.exists, map(out.joinpath, OF_MODELS)), None))
    ):
        raise ConfigError(
            f"{out} is the folder of a model ({model.name}), and a run would mix its files with it; choose another "
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
