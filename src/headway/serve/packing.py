"""The engine of an encoder: what all requests ask of it is read together, side by side in rows without padding."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headway.generate import GenerationConfig
from headway.generate.requests import Request
from headway.text import Encoded

LOG = logging.getLogger(__name__)
BUDGET = 1024
"""Tokens that a step reads: more are hardly faster, and what else the server writes waits for the end of a step."""


@dataclass(eq=False)
class Packed:
    """A text that is to be read, as an engine has it: a request for no new tokens.

    before: tokens of its call that stand before it.   deltas: what the head gives for it, once it has been read.
    error: why it was not.   turn: when it is read; those with less are read before it.
    """

    text: Encoded
    before: int = 0
    deltas: list[Tensor] = field(default_factory=list)
    error: BaseException | None = None
    ended: bool = False
    turn: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        self.request = Request(0, self.text.ids, GenerationConfig(), 0)


class Packing:
    """Reads texts in steps of up to `budget` tokens; a longer text is read alone.

    Requests take turns by their tokens, so that a short one does not wait for all of a long one that came before it,
    and none waits for ever. Nothing waits for company: a step reads what is there.

    Args:
        read: gives the outputs of texts that are read side by side (`TextEncoder.read`).
    """

    def __init__(self, read: Callable[[Sequence[Encoded]], list[Tensor]], budget: int = BUDGET) -> None:
        self.budget, self._read = budget, read
        self._lock = threading.Lock()
        self._waiting: list[Packed] = []
        self._now = 0  # the turn of what was read last

    @property
    def waiting(self) -> int:
        """Texts that are to be read."""
        return sum(not text.ended for text in self._waiting)

    def add(self, job: Packed) -> None:
        """A text more."""
        with self._lock:
            job.turn = self._now + job.before
            self._waiting.append(job)

    def cancel(self, job: Packed) -> None:
        """It need not be read any longer."""
        job.ended = True

    def step(self) -> None:
        """Reads the texts whose turn it is. What is raised fails these alone."""
        texts = self._next()
        if not texts:
            return
        try:
            outputs = self._read([text.text for text in texts])
            for text, output in zip(texts, outputs, strict=True):
                if bool(output.isfinite().all()):
                    text.deltas, text.count = [output], 1
                else:
                    text.error = FloatingPointError("the model gave what is no number")
        except Exception as error:
            LOG.exception("texts could not be read")
            for text in texts:
                text.error = error
        for text in texts:
            text.ended = True

    def _next(self) -> list[Packed]:
        """Takes the texts of a step from those that wait."""
        with self._lock:
            waiting = sorted((text for text in self._waiting if not text.ended), key=lambda text: text.turn)
            count, tokens = 0, 0
            for text in waiting:
                tokens += len(text.text.ids)
                if count and tokens > self.budget:
                    break
                count += 1
            self._waiting = waiting[count:]
            self._now = max([self._now, *(text.turn for text in waiting[:count])])
            return waiting[:count]
