"""A run that the clock ends: when to stop stepping, so that what must still be done is done in time."""

from __future__ import annotations

import math
from collections.abc import Callable

SPEED_KNOWN = 8
"""Steps after which a run's speed is known."""
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

    def steps_in_all(self, done: int, seconds: float) -> float:
        """Steps that the run will have made, at the speed of those so far."""
        if self.limit is None:
            return math.inf
        return done + max(0.0, self.limit - self.behind - seconds) / max(self.mean, 1e-9)

    def look_ahead(self, warmup: int, done: int, seconds: float, say: Callable[[str], None]) -> None:
        """Say, once a run by the clock knows its speed, that it ends within a warm-up of so many steps."""
        expected = self.steps_in_all(done, seconds)
        if self.steps == SPEED_KNOWN and expected < warmup:
            say(
                f"warmup {warmup} steps: at this speed the run ends after about {expected:.0f}, within its warm-up; "
                f"lower warmup (to {max(1, round(expected / 10))}, say), or give it more time"
            )
