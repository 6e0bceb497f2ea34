"""The rows of `headway bench growth`: each form at growing lengths until a limit stops it, and verdicts on them.

The figure of Beltagy et al. 2020, section 3.2: full attention grows quadratically until memory is exhausted, windows
grow linearly; the loop is slow, chunks are fast and take twice its memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headway import hardware
from headway.errors import BackendError, ConfigError
from headway.patterns import Window
from headway_lab.bench.attention import Say
from headway_lab.bench.cases import FLOAT32
from headway_lab.bench.forms import CLAIMED, FORMS, WINDOWS, Step, step
from headway_lab.bench.rows import Row, machine
from headway_lab.bench.subprocess_runner import LimitReached, SubprocessRunner
from headway_lab.profiling import Exponent, doublings, exponent

FIRST, TAIL = 512, 4
"""The shortest length (an eighth of the longest if that is less), and the number of last lengths that exponents are
fitted to."""
WARM = 128
SPARE = 1 << 30
"""Bytes that must stay free in addition to the limit."""
APART = 0.2
"""Largest difference of a fitted exponent from 1 or 2."""
CLEARLY = 1.1
"""Smallest ratio of times at which a form counts as slower."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which forms are measured, up to `most` tokens; a form stops at `limit` bytes or if a step would take more than
    `seconds`."""

    window: Window
    most: int
    direction: str
    forms: Sequence[str]
    limit: int
    seconds: float

    def __post_init__(self) -> None:
        free = hardware.memory_available()
        if free < self.limit + SPARE:
            most = (free - SPARE) >> 20
            raise ConfigError(
                f"bench growth: --memory-limit {self.limit >> 20} MiB, but {free >> 20} MiB are free, and 1024 of them "
                f"must stay free; {f'give --memory-limit {most} or less' if most >= 64 else 'free some memory'}"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        return doublings(min(FIRST, self.most // 8), self.most)


@dataclass(frozen=True)
class Curve:
    """The steps of one form by length; if it was stopped, at which length and by what: "memory", "time" or an error
    message."""

    name: str
    steps: dict[int, Step]
    stopped_at: int | None = None
    stopped_by: str | None = None

    def fitted(self, what: str) -> Exponent:
        """Returns the exponent with which "held" or "seconds" grows over the last lengths, of which there must be at
        least two."""
        tail = list(self.steps.items())[-TAIL:]
        return exponent([n for n, _ in tail], [getattr(s, what) for _, s in tail])


def growth(request: Request, say: Say) -> Iterator[Row]:
    """Yields a row for each form, then one with the verdicts."""
    curves = []
    for name in request.forms:
        say(f"{name}: {', '.join(map(str, request.lengths))} tokens, {request.direction}")
        curves.append(curve(name, request))
        yield to_row(curves[-1], request)
    yield Row(
        "growth",
        "verdicts",
        FLOAT32,
        machine=machine("auto"),
        extra={"verdicts": verdicts(curves, request.limit)},
    )


def curve(name: str, request: Request) -> Curve:
    """Measures one form in a process of its own, length by length."""
    steps: dict[int, Step] = {}
    with SubprocessRunner() as runner:
        try:
            runner.call(step, name, request.window, WARM, request.direction)
            for n in request.lengths:
                if steps and 4 * steps[max(steps)].seconds > request.seconds:
                    return Curve(name, steps, n, "time")
                steps[n] = runner.call_within(
                    request.limit, 60 + 8 * request.seconds, step, name, request.window, n, request.direction
                )
        except LimitReached as limit:
            return Curve(name, steps, n, "memory" if "MiB" in str(limit) else "time")
        except BackendError as error:
            return Curve(name, steps, request.lengths[len(steps)], str(error))
    return Curve(name, steps)


def to_row(curve: Curve, request: Request) -> Row:
    """Returns the row of one form; its time is that at the longest length."""
    steps, notes = list(curve.steps.values()), []
    preparation = FORMS[curve.name].prepares if curve.stopped_by == "memory" else ""
    if preparation:
        notes.append(f"stopped in preparing {preparation}")
    elif curve.stopped_by not in (None, "memory", "time"):
        notes.append(f"not measured from n={curve.stopped_at} on: {curve.stopped_by}")
    return Row(
        "growth",
        curve.name,
        FLOAT32,
        ours_ms=steps[-1].seconds * 1e3 if steps else None,
        machine=machine("auto", notes),
        extra={
            "pass": request.direction,
            "pattern": str(request.window),
            "quadratic": FORMS[curve.name].pairs,
            "n": list(curve.steps),
            "ms": [s.seconds * 1e3 for s in steps],
            "mib": [s.held / 2**20 for s in steps],
            "time_exponent": curve.fitted("seconds") if len(steps) > 1 else None,
            "memory_exponent": curve.fitted("held") if len(steps) > 1 else None,
            "limit_mib": request.limit >> 20,
            "stopped_at": curve.stopped_at,
            "stopped_by": curve.stopped_by,
            "stopped_in": preparation,
        },
    )


# -- verdicts ------------------------------------------------------------------------------------------------------


def verdicts(curves: Sequence[Curve], limit: int) -> list[str]:
    """Returns a sentence for each claim of the figure that can be checked with the measured forms, and whether it is
    seen."""
    curve_by_name = {form.name: form for form in curves if len(form.steps) > 1}
    windows = [curve_by_name[name] for name in WINDOWS if name in curve_by_name]
    results = [_full(curve_by_name["full"], limit)] if "full" in curve_by_name else []
    results += [_linear(windows)] if windows else []
    results += [_order(curve_by_name), _twice(curve_by_name)] if {*CLAIMED} <= {*curve_by_name} else []
    return [f"{text}: {'seen' if seen else 'NOT seen'}" for text, seen in results]


def _full(full: Curve, limit: int) -> tuple[str, bool]:
    memory, time = full.fitted("held"), full.fitted("seconds")
    end = (
        f"until the limit of {limit >> 20:,} MiB at n={full.stopped_at:,}"
        if full.stopped_by == "memory"
        else f"and is not stopped by the limit of {limit >> 20:,} MiB up to n={max(full.steps):,}"
    )
    seen = abs(memory.p - 2) <= APART and full.stopped_by == "memory"
    return f"full attention grows with exponent {memory} in memory ({time} in time) {end}", seen


def _linear(windows: Sequence[Curve]) -> tuple[str, bool]:
    parts, faster_growing = [], []
    for window in windows:
        memory, time = window.fitted("held"), window.fitted("seconds")
        parts.append(f"{window.name} {memory} and {time}")
        if max(memory.p, time.p) > 1 + APART:
            faster_growing.append(window.name)
    but = f", all but {' and '.join(faster_growing)}" if faster_growing else ""
    return (
        f"windows grow no faster than linearly in memory and time ({'; '.join(parts)}){but}",
        not faster_growing,
    )


def _order(by: dict[str, Curve]) -> tuple[str, bool]:
    names = [name for name in WINDOWS if name in by]
    n = _common(by, names)
    seconds = {name: by[name].steps[n].seconds for name in names}
    listed = ", ".join(
        f"{name} {seconds[name] * 1e3:.3g}" for name in sorted(seconds, key=seconds.__getitem__)
    )
    claimed = [seconds[name] for name in CLAIMED]
    seen = all(slow >= CLEARLY * fast for fast, slow in pairwise(claimed))
    return f"at n={n:,} the kernel is faster than chunks, and chunks than the loop (ms: {listed})", seen


def _twice(by: dict[str, Curve]) -> tuple[str, bool]:
    n = _common(by, ("loop", "chunks"))
    ratio = by["chunks"].steps[n].held / by["loop"].steps[n].held
    return f"at n={n:,} chunks hold about twice what the loop holds, inputs included ({ratio:.2f} times)", (
        1.5 <= ratio <= 2.5
    )


def _common(by: dict[str, Curve], names: Sequence[str]) -> int:
    """Returns the longest length that all of these forms reached."""
    return max(set.intersection(*({*by[name].steps} for name in names)))
