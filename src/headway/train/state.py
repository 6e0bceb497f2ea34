"""The whole state of a run in one object, to and from a `checkpoint-N` folder.

    checkpoint-N/   a Hugging Face folder (config, fp32 weights, tokenizer) and
      optimizer.safetensors   moments of every parameter, and torch's random state
      training.json           progress, settings, and what the data was

The folder is written as one: it is there as a whole or not at all.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from headway.checkpoints import disk
from headway.checkpoints.files import atomic_folder, current_folder, json_text, read_json, write_file
from headway.checkpoints.folder import load_folder, save_folder
from headway.checkpoints.lazy import copy_into
from headway.checkpoints.tensors import open_tensors
from headway.checkpoints.write import write_safetensors
from headway.data import TokenFile
from headway.errors import CheckpointError, ConfigError
from headway.text import Tokenizer
from headway.train.config import TrainConfig
from headway.train.metrics import METRICS
from headway.train.objective import Trained
from headway.train.optimizer import Optimizer

FORMAT = 1
CONFIG = "config.yaml"
STATE, OPTIMIZER, RNG = "training.json", "optimizer.safetensors", "rng/torch"
NAME = re.compile(r"checkpoint-(\d+)")
# What may be set differently when a run goes on: the rest decides weights, data, or the optimizer's state.
MAY_CHANGE = frozenset(
    ("steps", "epochs", "max_seconds", "micro_batch", "threads", "out", "log_every", "eval_every", "eval_tokens",
     "save_every", "keep_last", "sample_prompts", "sample_every", "sample_tokens", "gradient_checkpointing",
     "workers")
)  # fmt: skip
KEEPS_BITS = frozenset(
    ("out", "log_every", "eval_every", "eval_tokens", "save_every", "keep_last", "sample_prompts", "sample_every",
     "sample_tokens")
)  # fmt: skip


@dataclass
class Progress:
    """How far a run has come. Where it stands in its data follows from `step`: the order is a pure function.

    Attributes:
        step: optimizer steps that are done.
        trained_tokens: targets that gradients came from.
        seconds: spent in the loop, over all its processes.
    """

    step: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What bits depend on besides settings: resolved numbers of CPU threads, workers and rows per pass, and torch."""

    threads: int
    workers: int
    micro_batch: int
    torch: str = str(torch.__version__)


@dataclass
class State:
    """All that the next step depends on, besides settings and data."""

    model: Trained
    optimizer: Optimizer
    progress: Progress


def save_checkpoint(
    out: Path, state: State, *, config: TrainConfig, tokenizer: Tokenizer, data: TokenFile, machine: Machine
) -> Path:
    """Write `out`/checkpoint-N, N being the steps done, in one atomic step; then drop the oldest ones."""
    path = out / f"checkpoint-{state.progress.step}"
    record = {
        "format": FORMAT,
        **asdict(state.progress),
        "config": config.model_dump(mode="json"),
        "data": describe(data),
        "machine": asdict(machine),
    }
    with atomic_folder(path) as folder:
        # save_folder is atomic by itself; inside this folder its temporary sibling goes with it if we fail.
        save_folder(folder / "model", state.model, tokenizer=tokenizer, keep_pairing=True)
        for entry in sorted((folder / "model").iterdir()):
            disk.replace(entry, folder / entry.name)
        (folder / "model").rmdir()
        tensors = state.optimizer.state_tensors() | {RNG: torch.get_rng_state()}
        write_safetensors(folder / OPTIMIZER, tensors)
        write_file(folder / STATE, json_text(record))
    for old in checkpoints(out)[: -config.keep_last]:
        disk.remove(old)
    return path


def load_checkpoint(
    path: Path, state: State, *, config: TrainConfig, data: TokenFile, machine: Machine
) -> list[str]:
    """Fill `state` from a checkpoint; returns remarks: what is different now, and what follows from it.

    Raises CheckpointError for a broken checkpoint, ConfigError for settings or data that it does not fit.
    """
    record = read_record(path)
    remarks = compare(record, config, data, machine, path)
    folder = load_folder(path)
    own = state.model.state_dict()
    if folder.spec != state.model.spec or own.keys() != folder.tensors.keys():
        raise CheckpointError(
            f"{path} holds another model than the settings make; resume with its own settings"
        )
    with torch.no_grad():
        for name, value in own.items():
            copy_into(folder.tensors, name, value)
    tensors = dict(open_tensors(path / OPTIMIZER))
    if RNG not in tensors:
        raise CheckpointError(f"{path / OPTIMIZER} has no {RNG}")
    torch.set_rng_state(tensors.pop(RNG).clone())
    state.optimizer.load_state_tensors(tensors)
    state.progress = Progress(**{f.name: record[f.name] for f in fields(Progress)})
    return remarks


def read_record(path: Path) -> dict[str, Any]:
    """The content of training.json, checked for its format."""
    if not (path / STATE).exists():
        raise CheckpointError(
            f"{path} is no training checkpoint: it has no {STATE}"
            + ("" if path.is_dir() else " (there is no such folder)")
        )
    record = read_json(path / STATE)
    missing = [n for n in ("format", "step", "config", "data", "machine") if n not in record]
    if missing or record["format"] != FORMAT:
        raise CheckpointError(
            f"{path / STATE}: format {record.get('format')!r} is not {FORMAT}, or it is incomplete"
        )
    return record


def compare(
    record: dict[str, Any], config: TrainConfig, data: TokenFile, machine: Machine, path: Path
) -> list[str]:
    """Settings and data then and now. ConfigError for differences that do not make sense; else remarks."""
    then, now = record["config"], config.model_dump(mode="json")
    changed = [name for name in now if then.get(name) != now[name]]
    wrong = [f"{n} was {then.get(n)!r}, is {now[n]!r}" for n in changed if n not in MAY_CHANGE]
    if wrong:
        raise ConfigError(
            f"cannot go on from {path}: {'; '.join(wrong)}. Start a new run in another folder, or resume with the "
            "settings of the run (config.yaml in its folder)"
        )
    if record["data"] != describe(data):
        raise ConfigError(
            f"cannot go on from {path}: the training data is not the same: it was {record['data']}, it is "
            f"{describe(data)}"
        )
    remarks = [f"{n} was {then.get(n)!r}, is {now[n]!r}" for n in changed if n not in KEEPS_BITS]
    for name, value in asdict(machine).items():
        if record["machine"].get(name) != value:
            remarks.append(f"{name}: {record['machine'].get(name)} then, {value} now")
    return remarks


def describe(data: TokenFile) -> dict[str, Any]:
    """What tells one token file from another."""
    return {
        "tokens": len(data),
        "documents": data.documents,
        "text_bytes": data.text_bytes,
        "tokenizer": data.fingerprint.hex()[:16],
    }


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


def where_to_begin(out: Path, resume: str) -> Path | None:
    """The checkpoint to go on from, None to begin; see `train`. ConfigError where histories would be mixed."""
    there = checkpoints(out)
    if resume == "auto":
        return there[-1] if there else None
    if resume != "never":
        start = Path(resume)
        step = read_record(start)["step"]
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
