"""The result of a training run, its callbacks, and its interruption by signals."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from headway.text import Tokenizer
from headway.train.evaluation import Evaluation, evaluating


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        out: the run's folder. model: the trained model in it, a Hugging Face folder. metrics: metrics.jsonl. curve: the
            picture of it; None if matplotlib is not installed.
        steps, trained_tokens, seconds: totals of the whole run.
        loss: of the last step, per `unit`; None if no step was left to do. accuracy: of its predictions; None if not
            counted.
        validation: the evaluation on held-out data after the last step.
        next_command: a command that uses the model.
        transformers: whether transformers can load the model: "loads it", or why not; None for an adapter.
    """

    out: Path
    model: Path
    metrics: Path
    curve: Path | None
    steps: int
    trained_tokens: int
    seconds: float
    loss: float | None
    validation: Evaluation | None
    next_command: str
    accuracy: float | None = None
    unit: str = "token"
    transformers: str | None = None


@dataclass(frozen=True)
class CallbackContext:
    """The state of a run that is passed to a callback.

    Attributes:
        step, seconds: optimizer steps done, and seconds of training. last: whether this was the last step.
        record: the step's line of metrics.jsonl.
        model: the model in the run's dtype, which must not be changed.
        tokenizer: the run's tokenizer.
        say: prints a remark on stderr.
    """

    step: int
    seconds: float
    last: bool
    record: dict[str, Any]
    model: Any
    tokenizer: Tokenizer
    say: Callable[[str], None]


@dataclass(frozen=True)
class Callback:
    """A function that is called between steps: if `every_seconds` have passed since the last call (or the start), every
    `every_steps` steps, and after the last step."""

    function: Callable[[CallbackContext], None]
    every_seconds: float | None = None
    every_steps: int | None = None

    def is_due(self, step: int, seconds: float) -> bool:
        """Returns whether it is due after step `step`, `seconds` after the last call."""
        by_clock = self.every_seconds is not None and seconds >= self.every_seconds
        return by_clock or (self.every_steps is not None and step % self.every_steps == 0)

    def call(self, context: CallbackContext) -> None:
        """Calls the function with the model in evaluation mode, without gradients and with a forked random generator:
        random numbers that it draws do not change the run."""
        with evaluating(context.model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            self.function(context)


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C or SIGTERM, once the state has been saved in `checkpoint`."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self.checkpoint = checkpoint


@contextmanager
def stop_request(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Handles signals while open: the first Ctrl-C, SIGTERM or SIGHUP is recorded, so that the loop can end after its
    step; a second one raises KeyboardInterrupt at once. Yields a function that returns whether a signal has come.

    SIGHUP means that the terminal was closed: output is then discarded. It is not handled if ignored (`nohup`). Does
    nothing outside of the main thread, where Python cannot set signal handlers."""
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        say("stopping after this step (once more to stop at once, without saving)")

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    old_handlers = {number: signal.signal(number, handle) for number in numbers if is_main}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Redirects stdout and stderr to /dev/null if they are terminals: writing to a closed terminal raises OSError."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if os.isatty(number):
            os.dup2(nowhere, number)
    os.close(nowhere)
