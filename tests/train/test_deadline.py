"""When a run with a time limit ends, by hand: behind = held out x (seconds of a step) / 2 + 4 (seconds of a save)."""

import math

from headway.train.ending import Deadline


def running(
    limit: float | None, *, held: float = 3.0, steps: tuple[float, ...] = (), save: float = 0.0
) -> Deadline:
    deadline = Deadline(limit, held)
    deadline.save_seconds = save
    for seconds in steps:
        deadline.count(seconds)
    return deadline


def test_what_is_behind_the_last_step() -> None:
    assert (running(60).mean, running(60).behind) == (0.0, 0.0)
    assert running(60, save=0.25).behind == 1.0
    deadline = running(60, steps=(1.0, 3.0), save=0.25)
    assert (deadline.steps, deadline.mean) == (2, 2.0)
    assert deadline.behind == 3 * 2 / 2 + 4 * 0.25


def test_no_step_begins_that_does_not_fit() -> None:
    deadline = running(60, steps=(2.0,), save=0.25)
    assert [deadline.is_over(seconds) for seconds in (0.0, 55.99, 56.0, 99.0)] == [False, False, True, True]
    assert [deadline.left(seconds) for seconds in (0.0, 59.0, 60.0, 99.0)] == [60.0, 1.0, 0.0, 0.0]


def test_the_schedule_ends_with_the_last_step() -> None:
    deadline = running(60, steps=(2.0,), save=0.25)
    assert [deadline.scheduled(seconds) for seconds in (0.0, 14.0, 56.0, 60.0)] == [0.0, 15.0, 60.0, 60.0]
    assert running(1, steps=(2.0,), save=9.0).scheduled(1.0) == 1.0, "where nothing fits, all is over"


def test_without_a_limit_nothing_ends() -> None:
    deadline = running(None, steps=(2.0,), save=0.25)
    assert not deadline.is_over(1e9)
    assert deadline.left(7.0) == math.inf
    assert deadline.scheduled(7.0) == 7.0
