"""A task that is ready for its first step, without a run."""

from pathlib import Path
from typing import Any

from headway.train.config import TrainConfig
from headway.train.start import checked


def prepared(config: TrainConfig, out: Path | None = None) -> Any:
    """The task of these settings, in the folder `out` where it is given."""
    task = checked(config if out is None else config.model_copy(update={"out": str(out)}), 1)
    task.prepare(None)
    return task
