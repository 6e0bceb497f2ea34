"""Sending the lines of metrics.jsonl to trackers: TensorBoard, Weights & Biases, Trackio.

metrics.jsonl remains the reference. A resumed run sends the lines that a tracker lacks, and no line twice; a tracker
that fails does not stop the run. Each is an optional dependency (an extra), and none prompts the user.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.train.config import TrainConfig

Record = Mapping[str, Any]
Write = Callable[[Record], None]
"""Function that sends one line of metrics.jsonl."""
PROJECT = "headway"
TENSORBOARD = "tensorboard"  # folder of its event files, in the run's folder


@contextmanager
def tensorboard(config: TrainConfig, records: Sequence[Record]) -> Iterator[Write]:
    """Opens new event files in OUT/tensorboard; older ones are removed, since the caller sends all `records` again."""
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(config.out) / TENSORBOARD
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:

        def write(record: Record) -> None:
            for name, value in numbers(record).items():
                writer.add_scalar(name, value, record["step"])

        yield write


@contextmanager
def remote(name: str, config: TrainConfig, records: Sequence[Record]) -> Iterator[Write]:
    """Opens a run of Weights & Biases or Trackio, which have the same interface: init, log, finish.

    OUT/NAME.json holds the tracker's name of the run and the last line that was sent. It is written before the line is
    sent, so that no line is sent twice; a line that is being sent when the process is killed may be missing there."""
    path = Path(config.out) / f"{name}.json"
    state = json.loads(path.read_text()) if path.exists() and records else {}
    run = state.get("run", f"{Path(config.out).name}-{secrets.token_hex(4)}")
    last = tuple(state.get("last", (-1, False)))
    options = {"id": run, "dir": config.out} if name == "wandb" else {}
    project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    settings = config.model_dump(mode="json")
    with redirect_stdout(sys.stderr):  # stdout is for results
        tracked = import_module(name).init(
            project=project, name=run, config=settings, resume="allow", **options
        )

    def write(record: Record) -> None:
        nonlocal last
        key = (record["step"], any(name.startswith("val_") for name in record))
        if key <= last:
            return
        last = key
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps({"run": run, "last": key}) + "\n")
        os.replace(aside, path)
        tracked.log(numbers(record), step=record["step"])

    yield write
    with redirect_stdout(sys.stderr):
        tracked.finish()


TRACKERS: Mapping[str, Callable[[TrainConfig, Sequence[Record]], AbstractContextManager[Write]]] = {
    "tensorboard": tensorboard,
    "wandb": partial(remote, "wandb"),
    "trackio": partial(remote, "trackio"),
}


def check_trackers(config: TrainConfig) -> None:
    """Raises ConfigError for a tracker whose package is missing, and for Weights & Biases without an API key, for which
    it would prompt."""
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


@contextmanager
def tracked(config: TrainConfig, records: Sequence[Record], say: Callable[[str], None]) -> Iterator[Write]:
    """Opens the trackers of a run and sends them the lines `records`; yields a function that sends a line to all of
    them. Lines without a step are not sent (the last line of a run repeats a measure of its last step).

    A tracker that fails is dropped, with a remark by `say`, and the run continues."""
    opened: dict[str, tuple[Write, ExitStack]] = {}
    lines = [record for record in records if "step" in record]

    def attempt(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # whatever the error is, metrics.jsonl has the line
            opened.pop(name, None)
            say(
                f"{name}: no more metrics are sent ({type(error).__name__}: {error}); a resumed run sends the rest"
            )

    def begin(name: str) -> None:
        stack = ExitStack()
        write = stack.enter_context(TRACKERS[name](config, lines))
        for record in lines:
            write(record)
        opened[name] = write, stack

    def send(record: Record) -> None:
        for name, (write, _) in [*opened.items()] if "step" in record else ():
            attempt(name, partial(write, record))

    for name in config.report:
        attempt(name, partial(begin, name))
    try:
        yield send
    finally:
        for tracker, (_, stack) in [*opened.items()]:
            attempt(tracker, stack.close)


def numbers(record: Record) -> dict[str, float]:
    """Returns the numbers of a line, without the step, for trackers to plot."""
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
