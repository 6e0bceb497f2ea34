"""Prepares a task for its first step without starting a run."""

from pathlib import Path
from typing import Any

from headway.train.config import TrainConfig
from headway.train.start import checked


def prepared(config: TrainConfig, out: Path | None = None) -> Any:
    """Returns the prepared task of these settings; `out` replaces their output folder if given."""
    task = checked(config if out is None else config.model_copy(update={"out": str(out)}), 1)
    task.prepare(None)
    return task
