"""A run's folder, and the whole state of the run, to and from a `checkpoint-N` in it.

    config.yaml      the settings
    metrics.jsonl    a line for each step and each evaluation; loss.png: their picture
    final/           the trained model
    checkpoint-N/    the state after N steps: a Hugging Face folder (config, fp32 weights, tokenizer) and
      optimizer.safetensors   moments of every parameter
  adapter.safetensors     what is trained of a frozen model, instead of config and weights
      training.json           progress, settings, and what the data was

A checkpoint is written as one: it is there as a whole or not at all.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.adapters import save_adapter
from headway.checkpoints.folder import load_folder
from headway.checkpoints.hf.config import config_from_spec
from headway.checkpoints.hf.upgrade import parameter_name
from headway.checkpoints.saving import save_folder
from headway.errors import CheckpointError, ConfigError
from headway.models.tensor_parallel import own_part
from headway.parallel import Parallel
from headway.storage.files import atomic_folder, current_folder, json_text, write_file
from headway.storage.reading import read_json
from headway.storage.safetensors import write_safetensors
from headway.storage.tensors import open_tensors
from headway.train.adapters import restore_adapter, trained_adapter
from headway.train.config import TrainConfig, extra
from headway.train.config_io import upgraded_settings
from headway.train.metrics import METRICS
from headway.train.optimizer import Optimizer
from headway.train.shares import own_moments, whole_moments, whole_weights
from headway.train.tasks import text_task_of
from headway.train.tasks.base import Task
from headway.train.trainer import Progress

FORMAT = 2
STATE, OPTIMIZER, RNG = "training.json", "optimizer.safetensors", "rng/torch"
ALONE = {"processes": 1}  # what the machine was, where a checkpoint does not say
ADAPTER = "adapter.safetensors"
CONFIG, FINAL = "config.yaml", "final"
NAME = re.compile(r"checkpoint-\d+")


@dataclass
class State:
    """A run's state: settings, what is trained, the optimizer, and how far it has come; and on what machine, since bits
    depend on it: CPU threads, workers, rows per pass (None: all of the step's), the version of torch, and processes.

    `draws_in_turn`: dropout draws from torch's generator, whose state is kept. So did runs whose checkpoints have it,
    and so they go on; all others draw by (seed, step, micro batch).

    `save` and `load` are its way to a folder and back."""

    config: TrainConfig
    task: Task[Any]
    optimizer: Optimizer
    machine: dict[str, Any]
    progress: Progress
    draws_in_turn: bool = False

    def save(self, path: Path, parallel: Parallel) -> None:
        """Have the main process write the folder `path` in one atomic step; all processes call it alike."""
        moments = whole_moments(self.optimizer, self.task.model, parallel)
        with whole_weights(self.task.model, parallel):
            if parallel.is_main:
                self._write(path, moments)

    def _write(self, path: Path, moments: dict[str, Tensor]) -> None:
        record = {
            "format": FORMAT,
            **asdict(self.progress),
            "config": self.config.model_dump(mode="json"),
            "data": dict(self.task.data),
            "machine": self.machine,
            **({} if self.task.base is None else {"base": self.task.base.fingerprint}),
        }

        def add_state(folder: Path) -> None:
            random = {RNG: torch.get_rng_state()} if self.draws_in_turn else {}
            write_safetensors(folder / OPTIMIZER, moments | random)
            write_file(folder / STATE, json_text(record))

        if self.task.base is not None:
            with atomic_folder(path) as folder:
                write_safetensors(folder / ADAPTER, trained_adapter(self.task.model).tensors)
                self.task.tokenizer.save(folder)
                add_state(folder)
            return
        save_folder(
            path,
            self.task.model,
            tokenizer=self.task.tokenizer,
            generation=self.task.generation,
            keep_pairing=True,
            overwrite=True,
            before_publishing=add_state,
        )

    def load(self, path: Path) -> list[str]:
        """Fill model, optimizer and progress from a checkpoint; returns remarks: what is different now, and what
        follows from it.

        Raises CheckpointError for a broken checkpoint, ConfigError for settings or data that it does not fit.
        """
        record, data = read_record(path), self.task.data
        remarks = changes(record, self.config, path)
        if record["data"] != data:
            raise ConfigError(
                f"cannot go on from {path}: the training data is not the same: it was {record['data']}, it is {data}"
            )
        for name, now in self.machine.items():
            if (then := record["machine"].get(name, ALONE.get(name))) != now:
                remarks.append(f"{name}: {then} then, {now} now")
        self._load_weights(path, record.get("base"))
        tensors = own_moments(optimizer_tensors(path / OPTIMIZER), self.task.model)
        self.draws_in_turn = RNG in tensors
        if self.draws_in_turn:
            torch.set_rng_state(tensors.pop(RNG).clone())
        self.optimizer.load_state_tensors(tensors)
        for field in fields(Progress):
            setattr(self.progress, field.name, record[field.name])
        return remarks

    def take_moments(self, file: Path) -> int:
        """Begin with another run's moments, in the file `OPTIMIZER` of its checkpoint; of how many parameters.

        Those of parameters that have another name or shape here, or another optimizer, are left out."""
        tensors = own_moments(optimizer_tensors(file), self.task.model)
        tensors.pop(RNG, None)
        return self.optimizer.take_state_tensors(tensors)

    def _load_weights(self, path: Path, base: str | None) -> None:
        """Of the model, or of the adapter that was trained beside the model with the fingerprint `base`."""
        model = self.task.model
        if self.task.base is not None:
            if base != self.task.base.fingerprint:
                raise ConfigError(
                    f"cannot go on from {path}: its adapter was trained beside another model than the one that is in "
                    f"{self.task.base.folder} now (fingerprints {base} and {self.task.base.fingerprint}); put back "
                    "the model of the run"
                )
            restore_adapter(model, open_tensors(path / ADAPTER), path)
            return
        folder, own = load_folder(path), model.state_dict()
        # The folder has its patterns in their shortest form, the settings need not.
        same = config_from_spec(folder.spec) == config_from_spec(model.spec)
        if not same or own.keys() != folder.tensors.keys():
            raise CheckpointError(
                f"{path} holds another model than the settings make; resume with its own settings"
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(own_part(model, name, folder.tensors[name]))


def optimizer_tensors(file: Path) -> dict[str, Tensor]:
    """The content of an `OPTIMIZER` file, under the parameters' names of today."""
    return {_current_name(name): tensor for name, tensor in open_tensors(file).items()}


def _current_name(name: str) -> str:
    """PARAMETER/FIELD of any format with the parameter's name of today."""
    parameter, slash, field = name.rpartition("/")
    return parameter_name(parameter) + slash + field


def save_final(path: Path, task: Task[Any]) -> None:
    """Write the trained model as a folder; of a frozen one its adapter, as PEFT keeps it."""
    how: dict[str, Any] = {"tokenizer": task.tokenizer, "generation": task.generation, "overwrite": True}
    if task.base is None:
        save_folder(path, task.model, **how)
        return
    save_adapter(path, trained_adapter(task.model), task.model.spec, base=task.base.folder, **how)


def read_record(path: Path) -> dict[str, Any]:
    """The content of training.json, in today's terms."""
    if not (path / STATE).exists():
        raise CheckpointError(
            f"{path} is no training checkpoint: it has no {STATE}"
            + ("" if path.is_dir() else " (there is no such folder)")
        )
    record = read_json(path / STATE)
    missing = [n for n in ("format", "step", "config", "data", "machine") if n not in record]
    if missing or record["format"] not in (1, FORMAT):
        raise CheckpointError(
            f"{path / STATE}: format {record.get('format')!r} is not {FORMAT}, or it is incomplete"
        )
    record["config"] = upgraded_settings(record["config"])
    if "task" not in record["config"]:  # of format 1, which could leave it open: what the model is for
        record["config"]["task"] = text_task_of(load_folder(path).spec)
    return record


def changes(record: dict[str, Any], config: TrainConfig, path: Path) -> list[str]:
    """Settings that change the bits of what follows, with their values then and now.

    Raises ConfigError for differences that do not make sense, and for a checkpoint of another task."""
    now = config.model_dump(mode="json")
    when = {name: extra(field)["on_resume"] for name, field in type(config).grouped().items()}
    usual = {name: field.default for name, field in type(config).model_fields.items()}
    usual = {name: [*v] if isinstance(v, tuple) else v for name, v in usual.items()}  # as in JSON
    then = moved_along(usual | record["config"], now)
    if then["task"] != now["task"]:
        raise ConfigError(
            f"cannot go on from {path}: it is a checkpoint of task {then['task']}, and this run's is {now['task']}"
        )
    changed = [name for name in when if then[name] != now[name] and when[name] != "same bits"]
    said = {name: f"{name} was {then[name]!r}, is {now[name]!r}" for name in changed}
    wrong = [said[name] for name in changed if when[name] == "fixed"]
    if wrong:
        raise ConfigError(
            f"cannot go on from {path}: {'; '.join(wrong)}. Start a new run in another folder, or resume with the "
            "settings of the run (config.yaml in its folder)"
        )
    return list(said.values())


def take_mean(model: torch.nn.Module, paths: Sequence[Path]) -> None:
    """Fill a model with the mean of checkpoints, in float64, rounded once. (Vaswani et al. 2017, section 6.1.)"""
    states = [load_folder(path).tensors for path in paths]
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                mean = torch.stack([state[name].double() for state in states]).mean(0)
                value.copy_(own_part(model, name, mean))


def moved_along(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run whose folder has moved: a model or moments at the same place relative to the folder as those
    of `now` are these."""

    def beside(settings: Mapping[str, Any], name: str) -> str | None:
        return os.path.relpath(settings[name], settings["out"]) if settings.get(name) else None

    names = [
        name
        for name in ("model", "moments")
        if name in then and name in now and beside(then, name) == beside(now, name)
    ]
    return {**then, **{name: now[name] for name in names}}


def checkpoints(out: Path) -> list[Path]:
    """The training checkpoints of a run, oldest first; what a dying process left half-written is not one."""
    there = (p for p in out.glob("checkpoint-*") if NAME.fullmatch(p.name))
    return sorted((p for p in there if (current_folder(p) / STATE).exists()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """N of `checkpoint-N`."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def how_to_go_on(out: Path, step: int) -> str:
    """What to do with a run that stopped because something could not be written."""
    there, own = checkpoints(out), shlex.quote(str(out / CONFIG))
    how = f"go on from {there[-1]}: headway train --config {own} --resume auto" if there else "begin anew"
    return f"The run stopped at step {step}; when that is mended, {how}"


def where_to_begin(config: TrainConfig, resume: str) -> Path | None:
    """The checkpoint to go on from, None to begin; see `train`. ConfigError where histories would be mixed, and for
    settings that the checkpoint does not fit."""
    out = Path(config.out)
    there = checkpoints(out)
    if resume == "never":
        if there or (out / CONFIG).exists() or (out / METRICS).exists():
            what = f"a run ({there[-1].name})" if there else "a run without a checkpoint"
            raise ConfigError(
                f'{out} already holds {what}; go on with --resume auto (resume="auto"), or choose another folder '
                "with --out (out=...)"
            )
        return None
    if resume == "auto" and not there:
        return None
    start = there[-1] if resume == "auto" else Path(resume)
    record = read_record(start)
    changes(record, config, start)
    here = start.resolve().parent == out.resolve()
    later = [p.name for p in there if not here or step_of(p) > record["step"]]
    if later:
        raise ConfigError(
            f"{out} holds {', '.join(later)}, which {'go beyond' if here else 'do not come from'} {start}; choose "
            "another folder with --out, or remove them"
        )
    return start
