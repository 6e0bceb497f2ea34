"""Names on disk that earlier versions wrote, in today's terms.

format 1    headway 0.1: `objective`, next-token or masked-lm, where `task` is now; a translation had no such key,
            but `source`. YAML files have no format: their keys say which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

TASKS = {"next-token": "causal-lm", "masked-lm": "masked-lm"}


def upgraded_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file as today's; those that have a `task` are already."""
    if "task" in values:
        return dict(values)
    if "source" in values:
        return {"task": "translation", **values}
    rest = {name: value for name, value in values.items() if name != "objective"}
    objective = values.get("objective")
    return rest if objective is None else {"task": TASKS.get(objective, objective), **rest}


def upgraded_record(record: Mapping[str, Any], task_of_model: Callable[[], str]) -> dict[str, Any]:
    """training.json of format 1 as today's. The task is the one that the model is for, where the settings left it
    open."""
    config = upgraded_settings(record["config"])
    if "task" not in config:
        config["task"] = task_of_model()
    return {**record, "format": 2, "config": config}
