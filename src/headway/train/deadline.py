"""A run that the clock ends: when to stop stepping, so that what must still be done is done in time."""

from __future__ import annotations

import math

EVALUATION = 0.5
"""Of a training step's time, at most, for as much data: a third of its operations, and a margin."""
SAVES = 4
"""Of the first checkpoint's time, at the end: moments are twice its weights, and the model is saved once more."""


class Deadline:
    """`limit` seconds for all steps, the last evaluation and the last checkpoint; None is no limit.

    behind = steps held out x (seconds of a step) / 2 + 4 (seconds of the first checkpoint)

    held_steps    how many steps read as much as is held out
    """

    def __init__(self, limit: float | None, held_steps: float) -> None:
        self.limit, self.held_steps = limit, held_steps
        self.steps, self.step_seconds, self.save_seconds = 0, 0.0, 0.0

    def count(self, seconds: float) -> None:
        """A step took so long."""
        self.steps, self.step_seconds = self.steps + 1, self.step_seconds + seconds

    @property
    def behind(self) -> float:
        """Seconds that the run takes behind its last step, as far as is known."""
        return EVALUATION * self.held_steps * self.mean + SAVES * self.save_seconds

    @property
    def mean(self) -> float:
        """Seconds of a step."""
        return self.step_seconds / max(self.steps, 1)

    def is_over(self, seconds: float) -> bool:
        """Whether no further step fits, `seconds` after the first began."""
        return self.limit is not None and seconds + self.behind >= self.limit

    def left(self, seconds: float) -> float:
        """Seconds until the run is done."""
        return math.inf if self.limit is None else max(0.0, self.limit - seconds)

    def scheduled(self, seconds: float) -> float:
        """`seconds` on a clock that shows `limit` when the last step ends: what schedules go by."""
        if self.limit is None:
            return seconds
        return self.limit * min(1.0, seconds / max(self.limit - self.behind, 1e-9))
