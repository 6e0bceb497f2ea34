"""Where a run goes on, and what to type so that it does."""

from __future__ import annotations

import shlex
from pathlib import Path

from headway.errors import ConfigError
from headway.train.checkpoint import CONFIG, checkpoints, step_of
from headway.train.config import TrainConfig
from headway.train.metrics import METRICS
from headway.train.record import changes, read_record

OF_MODELS = ("config.json", "adapter_config.json")


def resume_command(out: Path, ranks: int) -> str:
    """What to type to go on with a run that so many processes had."""
    several = f"--processes {ranks} " if ranks > 1 else ""
    return f"headway train {several}--config {shlex.quote(str(out / CONFIG))} --resume auto"


def how_to_resume(out: Path, step: int, ranks: int) -> str:
    """What to do with a run of so many processes that stopped because something could not be written."""
    there = checkpoints(out)
    how = f"resume from {there[-1]}: {resume_command(out, ranks)}" if there else "start again"
    return f"The run stopped at step {step}; when that is mended, {how}"


def where_to_begin(config: TrainConfig, resume: str) -> Path | None:
    """The checkpoint to resume from, None to begin; see `train`. ConfigError where histories would be mixed, and for
    settings that the checkpoint does not fit."""
    out = Path(config.out)
    there = checkpoints(out)
    if (
        not there
        and not (out / CONFIG).exists()
        and (model := next(filter(Path.exists, map(out.joinpath, OF_MODELS)), None))
    ):
        raise ConfigError(
            f"{out} is the folder of a model ({model.name}), and a run would mix its files with it; choose another "
            "folder with --out (out=...)"
        )
    if resume == "never":
        if there or (out / CONFIG).exists() or (out / METRICS).exists():
            what = f"a run ({there[-1].name})" if there else "a run without a checkpoint"
            raise ConfigError(
                f'{out} already holds {what}; resume it with --resume auto (resume="auto"), or choose another folder '
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
