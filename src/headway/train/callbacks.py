"""Results, callbacks and interruption of a run."""

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
    """The results of a run.

    Attributes:
        out: the run's folder. model: in it, a Hugging Face folder. metrics, curve: metrics.jsonl and its picture,
            None where matplotlib, which draws it, is not installed.
        steps, trained_tokens, seconds: of the whole run.
        loss: of the last step, per `unit`. accuracy: of its predictions, None where that is not counted.
        validation: of held-out data, after the last step.
        next_command: what to type to use the model.
        transformers: "loads it", or why it does not; None of an adapter.
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
    """The state of a run that a callback may look at. `model` computes (in the run's dtype) and must be left as it is.

    Attributes:
        step, seconds: those that are done. last: whether the run is at its end.
        record: the step's line of metrics.jsonl.
        tokenizer: of the run.
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
    """Call `function(context)` between two steps: when `every_seconds` have gone by since the last call (or the start),
    every `every_steps` steps, and after the last step."""

    function: Callable[[CallbackContext], None]
    every_seconds: float | None = None
    every_steps: int | None = None

    def is_due(self, step: int, seconds: float) -> bool:
        """Whether it is due after step `step`, `seconds` after the last call."""
        by_clock = self.every_seconds is not None and seconds >= self.every_seconds
        return by_clock or (self.every_steps is not None and step % self.every_steps == 0)

    def call(self, context: CallbackContext) -> None:
        """Calls the function in evaluation mode, without gradients; its draws leave the run's generator alone."""
        with evaluating(context.model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            self.function(context)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the state was saved in `checkpoint`."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self.checkpoint = checkpoint


@contextmanager
def stop_request(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """While open, the first Ctrl-C or SIGTERM is remembered (yields a function that says whether there was one: the
    loop ends after its step); a second one raises KeyboardInterrupt at once. So is a terminal that is closed (SIGHUP),
    unless `nohup` has it ignored; nothing is said then, for there is nobody to read it. Only in the main thread:
    elsewhere Python takes no signals."""
    signals: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        say("stopping after this step (once more to stop at once, without saving)")

    is_main = threading.current_thread() is threading.main_thread()
    ends = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in ends if is_main}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Sends all output nowhere: writing to a terminal that is closed raises OSError."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if os.isatty(number):
            os.dup2(nowhere, number)
    os.close(nowhere)
