"""A run in its folder.

result = train(TextConfig(data="text/", out="runs/mine", steps=1000))
result = train(config, resume="auto")          # goes on; bit for bit the run that was never stopped
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from headway.errors import ConfigError
from headway.train.callbacks import Callback, TrainResult
from headway.train.checkpoint import Machine
from headway.train.config import TrainConfig
from headway.train.inputs import model_spec
from headway.train.lock import locked
from headway.train.master_weights import DTYPES, choose_precision
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.progress import Reporter
from headway.train.run_folder import RunFolder, where_to_begin
from headway.train.tasks import find_task, text_task_of
from headway.train.tasks.base import Task
from headway.train.text_config import TextConfig
from headway.train.trainer import Trainer


def train(
    config: TrainConfig,
    *,
    resume: str = "never",
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train as `config` says, in the folder `config.out`.

    Args:
        config: the settings; they are saved as config.yaml in the folder.
        resume: "never" (the folder must hold no run), "auto" (go on from its last checkpoint, or begin), or the
            path of a checkpoint. A resumed run ends with the very bits of one that was never stopped, at equal
            settings, threads and torch; not where the clock drives the schedule (`max_seconds` in training on text).
        callbacks: called between steps, e.g. to sample text.
        quiet: no progress on stderr.

    Raises:
        ConfigError, DataError, CheckpointError: before anything is trained. TrainingError: a loss or gradient that
        is not finite. Interrupted: Ctrl-C or SIGTERM, after the running step was finished and saved.
    """
    config = with_task(config)
    precision = choose_precision(config.dtype)
    with locked(Path(config.out)) as remark, seeded(config.seed, config.threads):
        start = where_to_begin(config, resume)
        if start is None:
            for left in ("data", "tokenizer"):  # of a run that never came to its first checkpoint
                shutil.rmtree(Path(config.out) / left, ignore_errors=True)
        task = find_task(str(config.task))(config, Path(config.out), start, DTYPES[precision.what])
        reporter = Reporter(task.steps, config.log_every, quiet=quiet)
        try:
            for said in (remark, f"{precision.what}: {precision.why}"):
                if said is not None:
                    reporter.note(said)
            return _run(config, task, start, callbacks, reporter, DTYPES[precision.what])
        finally:
            reporter.close()


def _run(
    config: TrainConfig,
    task: Task[Any, Any],
    start: Path | None,
    callbacks: Sequence[Callback],
    reporter: Reporter,
    dtype: torch.dtype,
) -> TrainResult:
    callbacks = [*task.callbacks(), *callbacks]
    pool = MicrobatchPool(task.workers)
    optimizer = task.optimizer(pool)
    machine = Machine(torch.get_num_threads(), task.workers, task.micro_batch)
    folder = RunFolder(config, task, optimizer, machine)
    try:
        progress = folder.open(start, reporter.note)
        trainer = Trainer(
            task,
            task.model,
            optimizer,
            schedule=task.schedule,
            clip=config.clip,
            dtype=dtype,
            pool=pool,
            progress=progress,
            steps=task.steps,
            max_seconds=config.max_seconds,
            eval_every=config.eval_every,
            save_every=config.save_every,
            callbacks=callbacks,
            store=folder,
            reporter=reporter,
        )
        if start is None:
            trainer.save()  # shows, before any work is done, that saving works
        record = trainer.run()
        return folder.finish(record, trainer.validation, reporter.note)
    finally:
        folder.close()


def with_task(config: TrainConfig) -> TrainConfig:
    """The same settings with their `task`: the one that the model is for, unless it is given.

    Raises ConfigError for settings of another task, and for a model that nothing trains."""
    if config.task is None and isinstance(config, TextConfig):
        return config.model_copy(update={"task": text_task_of(model_spec(config))})
    kind = find_task(str(config.task)).settings
    if not isinstance(config, kind):
        raise ConfigError(
            f"task {config.task} has settings of the class {kind.__name__}, got {type(config).__name__}"
        )
    return config


@contextmanager
def seeded(seed: int, threads: int | None) -> Iterator[None]:
    """While open, torch draws from `seed` (dropout; a checkpoint brings its own state) on `threads` CPU threads."""
    before, generator = torch.get_num_threads(), torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_rng_state(generator)
