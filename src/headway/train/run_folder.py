"""A run's folder: what stands in it, and where a run begins.

config.yaml      the settings
metrics.jsonl    a line for each step and each evaluation; loss.png: their picture
checkpoint-N/    the state after N steps (`headway.train.checkpoint`)
final/           the trained model
"""

from __future__ import annotations

import re
from pathlib import Path

from headway.checkpoints.storage.files import current_folder
from headway.errors import ConfigError
from headway.train.checkpoint import STATE, changes, read_record
from headway.train.config import TrainConfig
from headway.train.metrics import METRICS

CONFIG, FINAL = "config.yaml", "final"
NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_path(out: Path, steps: int) -> Path:
    """Where the state after `steps` steps lies."""
    return out / f"checkpoint-{steps}"


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
