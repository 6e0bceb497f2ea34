"""What goes in and out of a run besides settings and text: results, callbacks, interruption."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from headway.text import Tokenizer
from headway.train.evaluation import Evaluation
from headway.train.objective import Trained


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind: `model` is a Hugging Face folder; loss and accuracy of the last step (the latter for
    masked tokens alone), and held-out text."""

    out: Path
    model: Path
    metrics: Path
    curve: Path
    steps: int
    trained_tokens: int
    seconds: float
    loss: float | None
    validation: Evaluation | None
    accuracy: float | None = None


@dataclass(frozen=True)
class CallbackContext:
    """What a callback may look at. `model` computes (in the run's dtype) and must be left as it is."""

    step: int
    seconds: float
    last: bool
    record: dict[str, Any]
    model: Trained
    tokenizer: Tokenizer
    say: Callable[[str], None]


@dataclass(frozen=True)
class PeriodicCallback:
    """Call `run(moment)` after a step when `seconds` have gone by since the last call (or the start), or every
    `steps` steps, and after the last step."""

    run: Callable[[CallbackContext], None]
    seconds: float | None = None
    steps: int | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after the state was saved in `checkpoint`."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        self.checkpoint = checkpoint


class StopRequest:
    """While open, the first Ctrl-C or SIGTERM sets `asked` (the loop ends after its step); a second one ends it at
    once. Only in the main thread: elsewhere Python takes no signals."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("stopping after this step (once more to stop at once, without saving)")
