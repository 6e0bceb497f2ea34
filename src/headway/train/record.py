"""training.json: what a checkpoint says of its run, and whether a run of other settings may resume from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import CheckpointError, ConfigError
from headway.storage.reading import read_json
from headway.train.config import TrainConfig, extra

FORMAT = 2
STATE = "training.json"


def read_record(path: Path) -> dict[str, Any]:
    """The content of training.json."""
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


def changes(record: dict[str, Any], config: TrainConfig, path: Path) -> list[str]:
    """Settings that change the bits of what follows, with their values then and now.

    Raises ConfigError for differences that do not make sense, and for a checkpoint of another task."""
    now = config.model_dump(mode="json")
    when = {name: extra(field)["on_resume"] for name, field in type(config).grouped().items()}
    then = moved_along(record["config"], now)
    if then["task"] != now["task"]:
        raise ConfigError(
            f"cannot resume from {path}: it is a checkpoint of task {then['task']}, and this run's is {now['task']}"
        )
    changed = [name for name in when if then.get(name) != now[name] and when[name] != "same bits"]
    said = {name: f"{name} was {then.get(name)!r}, is {now[name]!r}" for name in changed}
    wrong = [said[name] for name in changed if when[name] == "fixed"]
    if wrong:
        raise ConfigError(
            f"cannot resume from {path}: {'; '.join(wrong)}. Start a new run in another folder, or resume with the "
            "settings of the run (config.yaml in its folder)"
        )
    return list(said.values())


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
