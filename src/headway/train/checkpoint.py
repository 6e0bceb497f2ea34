"""The whole state of a run, to and from a `checkpoint-N` folder.

    checkpoint-N/   a Hugging Face folder (config, fp32 weights, tokenizer) and
      optimizer.safetensors   moments of every parameter, and torch's random state
      training.json           progress, settings, and what the data was

The folder is written as one: it is there as a whole or not at all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from headway.checkpoints.folder import load_folder, save_folder
from headway.checkpoints.hf.config import config_from_spec
from headway.checkpoints.hf.upgrade import parameter_name
from headway.checkpoints.storage import disk
from headway.checkpoints.storage.files import atomic_folder, json_text, read_json, write_file
from headway.checkpoints.storage.lazy import copy_into
from headway.checkpoints.storage.safetensors import write_safetensors
from headway.checkpoints.storage.tensors import open_tensors
from headway.errors import CheckpointError, ConfigError
from headway.train.config import TrainConfig, extra
from headway.train.optimizer import Optimizer
from headway.train.tasks import text_task_of
from headway.train.tasks.base import Task
from headway.train.trainer import Progress
from headway.train.upgrade import upgraded_record

FORMAT = 2
STATE, OPTIMIZER, RNG = "training.json", "optimizer.safetensors", "rng/torch"


@dataclass(frozen=True)
class Machine:
    """What bits depend on besides settings: resolved numbers of CPU threads, workers and rows per pass (None: all of
    the step's), and torch."""

    threads: int
    workers: int = 1
    micro_batch: int | None = None
    torch: str = str(torch.__version__)


@dataclass
class State:
    """A run's state: settings, what is trained, the optimizer, what bits depend on besides, and how far it has come.

    `save` and `load` are its way to a folder and back."""

    config: TrainConfig
    task: Task[Any]
    optimizer: Optimizer
    machine: Machine
    progress: Progress

    def save(self, path: Path) -> None:
        """Write the folder `path` in one atomic step."""
        task = self.task
        record = {
            "format": FORMAT,
            **asdict(self.progress),
            "config": self.config.model_dump(mode="json"),
            "data": dict(task.data),
            "machine": asdict(self.machine),
        }
        with atomic_folder(path) as folder:
            # save_folder is atomic by itself; inside this folder its temporary sibling goes with it if we fail.
            own = folder / "model"
            save_folder(
                own, task.model, tokenizer=task.tokenizer, generation=task.generation, keep_pairing=True
            )
            for entry in sorted(own.iterdir()):
                disk.replace(entry, folder / entry.name)
            own.rmdir()
            tensors = self.optimizer.state_tensors() | {RNG: torch.get_rng_state()}
            write_safetensors(folder / OPTIMIZER, tensors)
            write_file(folder / STATE, json_text(record))

    def load(self, path: Path) -> list[str]:
        """Fill model, optimizer, progress and torch's random state from a checkpoint; returns remarks: what is
        different now, and what follows from it.

        Raises CheckpointError for a broken checkpoint, ConfigError for settings or data that it does not fit.
        """
        record, data = read_record(path), self.task.data
        remarks = [
            f"{name} was {then!r}, is {now!r}" for name, then, now in changes(record, self.config, path)
        ]
        if record["data"] != data:
            raise ConfigError(
                f"cannot go on from {path}: the training data is not the same: it was {record['data']}, it is {data}"
            )
        for name, value in asdict(self.machine).items():
            if record["machine"].get(name) != value:
                remarks.append(f"{name}: {record['machine'].get(name)} then, {value} now")
        folder, own = load_folder(path), self.task.model.state_dict()
        # The folder has its patterns in their shortest form, the settings need not.
        then, now = config_from_spec(folder.spec), config_from_spec(self.task.model.spec)
        if then != now or own.keys() != folder.tensors.keys():
            raise CheckpointError(
                f"{path} holds another model than the settings make; resume with its own settings"
            )
        with torch.no_grad():
            for name, value in own.items():
                copy_into(folder.tensors, name, value)
        tensors = {_current_name(name): tensor for name, tensor in open_tensors(path / OPTIMIZER).items()}
        if RNG not in tensors:
            raise CheckpointError(f"{path / OPTIMIZER} has no {RNG}")
        torch.set_rng_state(tensors.pop(RNG).clone())
        self.optimizer.load_state_tensors(tensors)
        for field in fields(Progress):
            setattr(self.progress, field.name, record[field.name])
        return remarks


def _current_name(name: str) -> str:
    """PARAMETER/FIELD of any format with the parameter's name of today."""
    parameter, slash, field = name.rpartition("/")
    return parameter_name(parameter) + slash + field


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
    if record["format"] == 1:
        return upgraded_record(record, lambda: text_task_of(load_folder(path).spec))
    return record


def changes(record: dict[str, Any], config: TrainConfig, path: Path) -> list[tuple[str, Any, Any]]:
    """Settings that change the bits of what follows: name, value then, value now.

    Raises ConfigError for differences that do not make sense, and for a checkpoint of another task."""
    fields, now = type(config).grouped(), config.model_dump(mode="json")
    usual = {name: field.default for name, field in fields.items() if not field.is_required()}
    then = usual | record["config"]
    if then["task"] != now["task"]:
        raise ConfigError(
            f"cannot go on from {path}: it is a checkpoint of task {then['task']}, and this run's is {now['task']}"
        )
    changed = [n for n in fields if then.get(n) != now[n] and extra(fields[n])["on_resume"] != "same bits"]
    wrong = [
        f"{n} was {then.get(n)!r}, is {now[n]!r}" for n in changed if extra(fields[n])["on_resume"] == "fixed"
    ]
    if wrong:
        raise ConfigError(
            f"cannot go on from {path}: {'; '.join(wrong)}. Start a new run in another folder, or resume with the "
            "settings of the run (config.yaml in its folder)"
        )
    return [(name, then.get(name), now[name]) for name in changed]
