"""A run's folder: what stands in it, where a run begins, and what is written on its way.

config.yaml      the settings
metrics.jsonl    a line for each step and each evaluation; loss.png: their picture
checkpoint-N/    the state after N steps (`headway.train.checkpoint`)
final/           the trained model
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.checkpoints.folder import save_folder
from headway.checkpoints.storage import disk
from headway.checkpoints.storage.files import atomic_write, current_folder
from headway.errors import ConfigError
from headway.models import cost
from headway.report import cell
from headway.train.callbacks import TrainResult
from headway.train.checkpoint import (
    STATE,
    Machine,
    Progress,
    State,
    changes,
    load_checkpoint,
    read_record,
    save_checkpoint,
)
from headway.train.config import TrainConfig
from headway.train.config_io import config_yaml
from headway.train.evaluation import Evaluation
from headway.train.metrics import CURVE, METRICS, MetricsLog, draw_curve, read_metrics
from headway.train.optimizer import Optimizer
from headway.train.progress import clock
from headway.train.tasks.base import Task

CONFIG, FINAL = "config.yaml", "final"
NAME = re.compile(r"checkpoint-(\d+)")


class RunFolder:
    """What a run writes. `open` before the first step; `close` in the end.

    Args:
        config: its settings.
        task: whose model, tokenizer and data the run is about.
        optimizer: its state is part of every checkpoint.
        machine: what bits depend on besides.
    """

    def __init__(
        self, config: TrainConfig, task: Task[Any, Any], optimizer: Optimizer, machine: Machine
    ) -> None:
        self.out = Path(config.out)
        self.state = State(task.model, optimizer, Progress())
        self._config, self._task, self._machine = config, task, machine
        self._metrics: MetricsLog | None = None

    def open(self, start: Path | None, say: Callable[[str], None]) -> Progress:
        """Load the checkpoint `start`, if there is one; write config.yaml, and go on with metrics.jsonl."""
        if start is not None:
            remarks = load_checkpoint(
                start, self.state, config=self._config, data=self._task.data, machine=self._machine
            )
            for remark in remarks:
                say(f"not bit for bit the same run: {remark}")
            say(f"going on from {start}: step {self.state.progress.step}")
        atomic_write(self.out / CONFIG, config_yaml(self._config))
        after = None if start is None else self.state.progress.step
        self._metrics = MetricsLog(self.out / METRICS, after=after)
        return self.state.progress

    def log(self, record: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        assert self._metrics is not None, "open comes first"
        self._metrics.write(record)

    def save(self) -> Path:
        """Write checkpoint-N, N being the steps done; then drop the oldest ones."""
        path = self.out / f"checkpoint-{self.state.progress.step}"
        save_checkpoint(
            path,
            self.state,
            config=self._config,
            tokenizer=self._task.tokenizer,
            data=self._task.data,
            machine=self._machine,
            generation=self._task.generation,
        )
        for old in checkpoints(self.out)[: -self._config.keep_last]:
            disk.remove(old)
        return path

    def finish(
        self, record: Mapping[str, Any], validation: Evaluation | None, say: Callable[[str], None]
    ) -> TrainResult:
        """Save the trained model and draw the curve. `record` is the last step's, empty where none was left to do."""
        task, progress, model = self._task, self.state.progress, self.out / FINAL
        save_folder(model, task.model, tokenizer=task.tokenizer, generation=task.generation, overwrite=True)
        if validation is not None and validation.bits_per_byte is not None:
            self.log({"val_bits_per_byte": validation.bits_per_byte})
        metrics, curve = self.out / METRICS, self.out / CURVE
        parameters = cost.parameter_count(task.model.spec)
        title = f"{cell(parameters)} parameters, {cell(progress.trained_tokens)} trained tokens"
        draw_curve(read_metrics(metrics), curve, title)
        say(f"{model}: {progress.step} steps in {clock(progress.seconds)}")
        return TrainResult(
            out=self.out,
            model=model,
            metrics=metrics,
            curve=curve,
            steps=progress.step,
            trained_tokens=progress.trained_tokens,
            seconds=progress.seconds,
            loss=record.get("loss"),
            validation=validation,
            next_command=task.next_command.format(model=shlex.quote(str(model))),
            accuracy=record.get("accuracy"),
        )

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.close()


def checkpoints(out: Path) -> list[Path]:
    """The training checkpoints of a run, oldest first; what a dying process left half-written is not one."""
    if not out.is_dir():
        return []
    there = [p for p in out.iterdir() if NAME.fullmatch(p.name) and (current_folder(p) / STATE).exists()]
    return sorted(there, key=step_of)


def step_of(checkpoint: Path) -> int:
    """N of `checkpoint-N`."""
    name = NAME.fullmatch(checkpoint.name)
    assert name is not None, checkpoint
    return int(name[1])


def where_to_begin(config: TrainConfig, resume: str) -> Path | None:
    """The checkpoint to go on from, None to begin; see `train`. ConfigError where histories would be mixed, and for
    settings that the checkpoint does not fit."""
    out = Path(config.out)
    there = checkpoints(out)
    if resume == "auto":
        if not there:
            return None
        changes(read_record(there[-1]), config, there[-1])
        return there[-1]
    if resume != "never":
        start = Path(resume)
        record = read_record(start)
        changes(record, config, start)
        step = record["step"]
        here = start.resolve().parent == out.resolve()
        later = [p.name for p in there if not here or step_of(p) > step]
        if later:
            raise ConfigError(
                f"{out} holds {', '.join(later)}, which {'go' if here else 'do not come from'} "
                f"{'beyond ' if here else ''}{start}; choose another folder with --out, or remove them"
            )
        return start
    if there or (out / CONFIG).exists() or (out / METRICS).exists():
        what = f"a run ({there[-1].name})" if there else "a run without a checkpoint"
        raise ConfigError(
            f'{out} already holds {what}; go on with --resume auto (resume="auto"), or choose another folder '
            "with --out (out=...)"
        )
    return None
