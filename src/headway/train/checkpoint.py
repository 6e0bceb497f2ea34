"""Checkpoints: the layout of a run's folder, saving and loading the whole state of a run as `checkpoint-N`, and whether
a run with changed settings may resume from one.

    config.yaml      the settings
    metrics.jsonl    one line per step and per evaluation; loss.png: a plot of them
    final/           the trained model
    checkpoint-N/    the state after N steps: a Hugging Face folder (config, fp32 weights, tokenizer) and
      optimizer.safetensors   optimizer state of every parameter
      adapter.safetensors     the adapter of a frozen model, instead of config and weights
      training.json           progress, settings, and a description of the data

In shards, weights and optimizer state are `model-shard-00001-of-00002.safetensors` (or `adapter-shard-..`) and
`optimizer-shard-..` instead, one of each per process (`storage/shards.py`), and the config's model_type is "headway",
since tensors have the names of the modules.

A checkpoint is published atomically: it exists as a whole or not at all.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.folder import load_folder
from headway.checkpoints.hf.config import config_from_spec, own_config
from headway.checkpoints.saving import describe, save_folder
from headway.errors import CheckpointError, ConfigError
from headway.parallel import Parallel
from headway.parallel.sharded import fill, own_parts, own_state
from headway.storage.files import atomic_folder, current_folder, json_text, write_file
from headway.storage.reading import read_json
from headway.storage.safetensors import write_safetensors
from headway.storage.shards import write_shard
from headway.storage.tensors import MODEL, Tensors, open_shards, open_tensors
from headway.train.config import TrainConfig, extra
from headway.train.inputs import restore_adapter, trained_adapter
from headway.train.optimizer import Optimizer
from headway.train.tasks.base import Task
from headway.train.trainer import Progress

MOMENTS, ADAPTER = "optimizer", "adapter"
"""Stems of the file names of the optimizer state and of the adapter, and of their shards."""
CONFIG = "config.yaml"
NAME = re.compile(r"checkpoint-\d+")


@dataclass
class State:
    """The whole state of a run, which `save` and `load` write to a folder and read from it.

    Attributes:
        config: the settings. task: holds the model and tokenizer. optimizer, progress: their current state.
        machine: what the bits of the results depend on besides: CPU threads, workers, rows per forward pass (None: all
            rows of the step), the version of torch, and the numbers of processes that add up the gradient and share
            experts, layers (tp) or rows (cp).
    """

    config: TrainConfig
    task: Task[Any]
    optimizer: Optimizer
    machine: dict[str, Any]
    progress: Progress

    @property
    def record(self) -> str:
        """The content of training.json, as text."""
        record = {
            "format": FORMAT,
            **asdict(self.progress),
            "config": self.config.model_dump(mode="json"),
            "data": dict(self.task.data),
            "machine": self.machine,
            **({} if self.task.base is None else {"base": self.task.base.fingerprint}),
        }
        return json_text(record)

    def save(self, path: Path, trained: Any, moments: Mapping[str, Tensor]) -> None:
        """Writes the checkpoint `path` atomically, from whole (gathered) tensors: the model or adapter (`trained`, see
        `Saver.trained`) and the optimizer state (`moments`)."""

        def add_state(folder: Path) -> None:
            write_safetensors(folder / f"{MOMENTS}.safetensors", moments)
            write_file(folder / STATE, self.record)

        if self.task.base is not None:
            with atomic_folder(path) as folder:
                write_safetensors(folder / f"{ADAPTER}.safetensors", trained.tensors)
                self.task.tokenizer.save(folder)
                add_state(folder)
            return
        save_folder(
            path,
            trained,
            tokenizer=self.task.tokenizer,
            generation=self.task.generation,
            keep_pairing=True,
            overwrite=True,
            before_publishing=add_state,
        )

    @property
    def trained(self) -> str:
        """Stem of the names of the shards of weights: of the model, or of the adapter beside a frozen model."""
        return MODEL if self.task.base is None else ADAPTER

    def shard(self, parallel: Parallel, *, copied: bool) -> Callable[[Path], None]:
        """Returns a function that writes this process's shards of the current state into a folder; in the main process,
        it also writes everything that is not sharded. If `copied`, the tensors are copied to memory now, and the
        function may be called while training continues. Collective: all processes must call it."""
        task, moments = self.task, self.optimizer.state_tensors()
        weights = own_state(task.model) if task.base is None else dict(trained_adapter(task.model).tensors)
        parts = own_parts(weights | moments, parallel)
        if copied:
            parts = {n: p._replace(value=p.value.to("cpu", copy=True)) for n, p in parts.items()}
        record, stem, numbers = self.record, self.trained, (parallel.rank, parallel.mesh.ranks)

        def write(folder: Path) -> None:
            write_shard(folder, stem, *numbers, {n: p for n, p in parts.items() if n in weights})
            write_shard(folder, MOMENTS, *numbers, {n: p for n, p in parts.items() if n not in weights})
            if parallel.is_main:
                if task.base is None:
                    spec = own_config(task.model.spec)  # weights have the names of the module
                    describe(folder, spec, torch.float32, task.tokenizer, task.generation)
                else:
                    task.tokenizer.save(folder)
                write_file(folder / STATE, record)

        return write

    def load(self, path: Path) -> list[str]:
        """Loads model, optimizer and progress from a checkpoint; returns remarks on settings and machine that differ
        from those of the checkpoint.

        Raises CheckpointError for a broken checkpoint, ConfigError for settings or data that do not match it.
        """
        record, data = read_record(path), self.task.data
        remarks = changes(record, self.config, path)
        if record["data"] != data:
            raise ConfigError(
                f"cannot resume from {path}: the training data differs: it was {record['data']}, now it is {data}"
            )
        for name, now in self.machine.items():
            if (then := record["machine"].get(name)) != now:
                remarks.append(f"{name}: {then} then, {now} now")
        self.load_weights(path, record)
        self.optimizer.load_state_tensors(state_tensors(path, MOMENTS))
        for field in fields(Progress):
            setattr(self.progress, field.name, record[field.name])
        return remarks

    def load_weights(self, path: Path, record: Mapping[str, Any]) -> None:
        """Loads the model, or the adapter beside it, from a checkpoint whose training.json is `record`. Raises as
        `load`."""
        model = self.task.model
        if self.task.base is not None:
            if (base := record.get("base")) != self.task.base.fingerprint:
                raise ConfigError(
                    f"cannot resume from {path}: its adapter was trained on another model than the one now in "
                    f"{self.task.base.folder} (fingerprints {base} and {self.task.base.fingerprint}); restore the "
                    "model of the run"
                )
            restore_adapter(model, state_tensors(path, ADAPTER), path)
            return
        folder, local = load_folder(path), own_state(model)
        # Compare configs, not specs: a config has patterns in their shortest form, a spec from settings need not.
        same_config = config_from_spec(folder.spec) == config_from_spec(model.spec)
        elsewhere = () if model.shards is None else model.shards.elsewhere
        if not same_config or {*local, *elsewhere} != folder.tensors.keys():
            raise CheckpointError(
                f"{path}: its model differs from that of the settings; resume with the run's own config.yaml"
            )
        for name, value in local.items():
            fill(value, folder.tensors, name)


def state_tensors(place: Path, what: str) -> Tensors:
    """Opens the adapter (`ADAPTER`) or optimizer state (`MOMENTS`) of a checkpoint, or the tensors of a file."""
    if not place.is_dir():
        return open_tensors(place)
    shards = open_shards(place, what)
    return open_tensors(place / f"{what}.safetensors") if shards is None else shards


def take_mean(model: torch.nn.Module, paths: Sequence[Path]) -> None:
    """Sets a model's weights to the mean of those of checkpoints, computed in float64 and rounded once (Vaswani et al.
    2017, section 6.1)."""
    states = [load_folder(path).tensors for path in paths]
    for name, value in own_state(model).items():
        if value.is_floating_point():
            fill(value, {name: torch.stack([state[name].double() for state in states]).mean(0)}, name)


def checkpoints(out: Path) -> list[Path]:
    """Returns the complete training checkpoints of a run, oldest first."""
    folders = (p for p in out.glob("checkpoint-*") if NAME.fullmatch(p.name))
    return sorted((p for p in folders if (current_folder(p) / STATE).exists()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Returns N of `checkpoint-N`."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


FORMAT = 2
STATE = "training.json"


def read_record(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's training.json. Raises CheckpointError if it is missing, incomplete or of another format."""
    if not (path / STATE).exists():
        raise CheckpointError(
            f"{path} is not a training checkpoint: "
            + (f"it has no {STATE}" if path.is_dir() else "no such folder")
        )
    record = read_json(path / STATE)
    missing = [n for n in ("format", "step", "config", "data", "machine") if n not in record]
    if (other := record.get("format", FORMAT)) != FORMAT or missing:
        raise CheckpointError(
            f"{path / STATE}: "
            + (
                f"format {other!r} is not {FORMAT}"
                if other != FORMAT
                else f"incomplete: no {', '.join(missing)}"
            )
        )
    return record


def changes(record: dict[str, Any], config: TrainConfig, path: Path) -> list[str]:
    """Returns a line for each setting that differs from the checkpoint's and changes the bits of the following steps,
    with both values.

    Raises ConfigError for changed settings that a resumed run must keep, and for a checkpoint of another task."""
    now = config.model_dump(mode="json")
    on_resume = {name: extra(field)["on_resume"] for name, field in type(config).grouped().items()}
    stored = moved_along(record["config"], now)
    if stored["task"] != now["task"]:
        raise ConfigError(
            f"cannot resume from {path}: its task is {stored['task']}, but this run's is {now['task']}"
        )
    changed = [name for name in on_resume if stored.get(name) != now[name] and on_resume[name] != "same bits"]
    lines = {name: f"{name} was {stored.get(name)!r}, is {now[name]!r}" for name in changed}
    refused = [lines[name] for name in changed if on_resume[name] == "fixed"]
    if refused:
        raise ConfigError(
            f"cannot resume from {path}: {'; '.join(refused)}. Start a new run in another folder, or resume with the "
            "settings of the run (config.yaml in its folder)"
        )
    return list(lines.values())


def moved_along(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings `then` of a run whose folder may have been moved: if its model or moments have the same path
    relative to the run's folder as those of `now`, the current path replaces the old one."""

    def beside(settings: Mapping[str, Any], name: str) -> str | None:
        return os.path.relpath(settings[name], settings["out"]) if settings.get(name) else None

    names = [
        name
        for name in ("model", "moments")
        if name in then and name in now and beside(then, name) == beside(now, name)
    ]
    return {**then, **{name: now[name] for name in names}}
