"""Where the lines of metrics.jsonl go besides: TensorBoard, Weights & Biases, Trackio.

metrics.jsonl stays the truth. A run that goes on sends what a tracker lacks of it, and no line twice; what a tracker
cannot take costs the run nothing. Each is an extra of its own, and none asks questions.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ConfigError
from headway.train.config import TrainConfig

Record = Mapping[str, Any]
PROJECT = "headway"
TENSORBOARD = "tensorboard"  # the folder of its events, in that of the run


class Tracker(Protocol):
    """Takes the lines of a run; `name` is that of the setting `report`."""

    name: str

    def write(self, record: Record) -> None:
        """One line of metrics.jsonl."""
        ...

    def close(self) -> None:
        """What is not sent yet is sent."""
        ...


class TensorBoard(Tracker):
    """Event files in OUT/tensorboard, written anew from the lines that a run goes on after."""

    name = "tensorboard"

    def __init__(self, config: TrainConfig, kept: Sequence[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.out) / TENSORBOARD
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        for record in kept:
            self.write(record)

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Remote(Tracker):
    """Weights & Biases and Trackio, whose calls are the same: init, log, finish.

    OUT/NAME.json holds the run's name there and its last line that was sent. It is written before the line is sent, so
    that a line is never sent twice; one that is being sent when the process is killed may be missing there."""

    def __init__(self, name: str, config: TrainConfig, kept: Sequence[Record]) -> None:
        self.name, self._path = name, Path(config.out) / f"{name}.json"
        given = json.loads(self._path.read_text()) if self._path.exists() and kept else {}
        self._run = given.get("run", f"{Path(config.out).name}-{secrets.token_hex(4)}")
        self._last = tuple(given.get("last", (-1, False)))
        module = import_module(name)
        own = {"id": self._run, "dir": config.out} if name == "wandb" else {}
        project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
        settings = config.model_dump(mode="json")
        with redirect_stdout(sys.stderr):  # stdout is for results
            self._tracked = module.init(
                project=project, name=self._run, config=settings, resume="allow", **own
            )
        for record in kept:
            self.write(record)

    def write(self, record: Record) -> None:
        key = (record["step"], any(name.startswith("val_") for name in record))
        if key <= self._last:
            return
        self._last = key
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps({"run": self._run, "last": key}) + "\n")
        os.replace(aside, self._path)
        self._tracked.log(numbers(record), step=record["step"])

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._tracked.finish()


TRACKERS: Mapping[str, Callable[[TrainConfig, Sequence[Record]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda config, kept: Remote("wandb", config, kept),
    "trackio": lambda config, kept: Remote("trackio", config, kept),
}


def check_trackers(config: TrainConfig) -> None:
    """Raises ConfigError for a tracker whose package is missing, and for Weights & Biases without a key, for which it
    would ask."""
    for name in config.report:
        if find_spec(name) is None:
            raise ConfigError(
                f'report: {name} is not installed; pip install "headway[{name}]", or leave it out'
            )
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if (
        "wandb" in config.report
        and not offline
        and not import_module("wandb").login(prompt=False, verify=False)
    ):
        raise ConfigError(
            "report: wandb has no API key; set WANDB_API_KEY, or run `wandb login` once, or set WANDB_MODE=offline"
        )


class Trackers:
    """The trackers of a run, which gets on without one that fails. A context manager."""

    def __init__(self, config: TrainConfig, kept: Sequence[Record], say: Callable[[str], None]) -> None:
        self._say, self._open = say, list[Tracker]()
        lines = [record for record in kept if "step" in record]
        for name in config.report:
            self._attempt(name, lambda name=name: self._open.append(TRACKERS[name](config, lines)))  # type: ignore[misc]

    def write(self, record: Record) -> None:
        """One line for all of them, if it is of a step: the last one of a run says again what its step has said."""
        for tracker in [*self._open]:
            if "step" in record and not self._attempt(tracker.name, lambda one=tracker: one.write(record)):  # type: ignore[misc]
                self._open.remove(tracker)

    def _attempt(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # whatever it is, metrics.jsonl has the line
            self._say(
                f"{name} takes no more of this run ({type(error).__name__}: {error}); a resumed one sends the rest"
            )
            return False
        return True

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self._open:
            self._attempt(tracker.name, tracker.close)


def numbers(record: Record) -> dict[str, float]:
    """What a tracker draws of a line."""
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
