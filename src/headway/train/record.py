"""training.json: what a checkpoint says of its run, and whether a run of other settings may resume from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoints.folder import load_folder
from headway.errors import CheckpointError, ConfigError
from headway.storage.reading import read_json
from headway.train.config import TrainConfig, extra
from headway.train.config_io import upgraded_settings
from headway.train.tasks import text_task_of

FORMAT = 2
STATE = "training.json"


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
    if (
        "task" not in record["config"]
    ):  # of format 1, whose settings could leave it open: what the model is for
        record["config"]["task"] = text_task_of(load_folder(path).spec)
    return record


def changes(record: dict[str, Any], config: TrainConfig, path: Path) -> list[str]:
    """Settings that change the bits of what follows, with their values then and now.

    Raises ConfigError for differences that do not make sense, and for a checkpoint of another task."""
    now = config.model_dump(mode="json")
    when = {name: extra(field)["on_resume"] for name, field in type(config).grouped().items()}
    usual = {name: field.default for name, field in type(config).model_fields.items()}
    usual = {
        name: [*value] if isinstance(value, tuple) else value for name, value in usual.items()
    }  # as in JSON
    then = moved_along(usual | record["config"], now)
    if then["task"] != now["task"]:
        raise ConfigError(
            f"cannot resume from {path}: it is a checkpoint of task {then['task']}, and this run's is {now['task']}"
        )
    changed = [name for name in when if then[name] != now[name] and when[name] != "same bits"]
    said = {name: f"{name} was {then[name]!r}, is {now[name]!r}" for name in changed}
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
