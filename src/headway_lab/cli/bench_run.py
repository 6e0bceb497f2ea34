"""Shared parts of the `headway bench` commands: their options, the output of rows, and the exit code."""

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from headway.cli import report_error
from headway.cli._shared import note, set_threads
from headway.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from headway_lab.bench.measure import Effort
    from headway_lab.bench.rows import Row


def chosen(named: Sequence[str] | None, known: Iterable[str], usual: Sequence[str], what: str) -> list[str]:
    """Returns the given names, or the usual ones if there are none. Raises ConfigError for an unknown name, with a list
    of the known ones."""
    names = tuple(known)
    for name in named or ():
        if name not in names:
            raise ConfigError(
                f"bench: no {what} {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}"
            )
    return list(named or usual)


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM act as Ctrl-C inside the block, so that what was measured so far is printed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How much is measured, and where the rows are written.

    quick: a subset, in a minute or two
    json: print each row as an object, with machine and versions
    out: folder for charts (PNG)
    """

    quick: bool = False
    json: bool = False
    threads: int | None = None
    out: Path | None = None

    def effort(self, usual: "Effort") -> "Effort":
        """Returns how long each row is measured: `usual`, or `QUICK` for a quick run."""
        from headway_lab.bench.measure import QUICK

        return QUICK if self.quick else usual

    def show(self, rows: "Iterable[Row]") -> int:
        """Prints the rows as they come, on stdout (JSON) or on stderr, and in the end all of them as a table, also if
        Ctrl-C or SIGTERM interrupts. Returns exit code 1 if a peer's result differs from headway's or if nothing could
        be measured."""
        set_threads(self.threads)
        from headway_lab.bench import rows as results
        from headway_lab.bench.charts import draw
        from headway_lab.bench.measure import mismatches

        measured: list[Row] = []
        try:
            with terminable():
                for row in rows:
                    measured.append(row)
                    if self.json:
                        print(row.to_line(), flush=True)
                    else:
                        note(f"  {row.summary()}")
        finally:
            if measured and not self.json:
                print(results.to_text(measured), flush=True)
            if measured and self.out is not None:
                note("written: " + ", ".join(map(str, draw(measured, self.out))))
        problems = mismatches(measured)
        if all(row.ours_ms is None for row in measured):
            problems.append("nothing could be measured; each row says why")
        for line in problems:
            report_error(line)
        return 1 if problems else 0


@dataclass(frozen=True, kw_only=True)
class ModelsRun(Run):
    """A bench of whole decoders, with weights stored in several formats.

    model: tiny, 32m or 1.1b, LLaMAs, moe-166m or hybrid-0.8b (repeatable) [default: 32m and 1.1b; 32m with --quick]
    weights: bf16, int8, int4, q4_K, q5_K, q6_K, nf4, int8-row (one scale a row) or compressed (bf16 without
        loss); repeatable [default: bf16, int8, int4, as far as they apply]
    """

    model: list[str] | None = None
    weights: list[str] | None = None

    def models(self, *more: str) -> list[str]:
        """Returns the models that were named, or the usual ones. `more`: models that only this bench has."""
        from headway_lab.bench.models import DECODERS

        usual = ("32m",) if self.quick else ("32m", "1.1b", *more)
        return chosen(self.model, (*DECODERS, *more), usual, "model")

    def kinds(self, usual: tuple[str, ...]) -> list[str]:
        """Returns the weight formats that were named, or the usual ones."""
        from headway_lab.bench.models import WEIGHTS

        return chosen(self.weights, WEIGHTS, usual, "kind of weights")
