"""The learning rate as a pure function of how far the run has come."""

from __future__ import annotations

import math


def learning_rate(progress: float, *, warmup: float, floor: float) -> float:
    """Factor of the peak learning rate: a linear warm-up, then a half cosine down to `floor`.

        p < w:   p / w
        p >= w:  floor + (1 - floor) (1 + cos(pi (p - w) / (1 - w))) / 2

    `progress` is the share of the run that is done when the step *ends*, in (0, 1]: (step + 1) / steps, or the
    elapsed share of a time budget. So the first step of a run with a warm-up has a rate above 0, and the last
    step has the floor. `warmup` and `floor` are shares too.
    """
    p = min(max(progress, 0.0), 1.0)
    if p < warmup:
        return p / warmup
    if warmup == 1.0:
        return 1.0
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * (p - warmup) / (1.0 - warmup)))
