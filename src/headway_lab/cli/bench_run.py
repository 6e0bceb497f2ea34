"""Shared by the commands of `headway bench`: their options, the output of rows, and the exit code."""

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
    """The given names, or the usual ones. Raises ConfigError for a name that does not exist, listing those that do."""
    names = tuple(known)
    for name in named or ():
        if name not in names:
            raise ConfigError(
                f"bench: no {what} {name!r}{did_you_mean(name, names)}; known: {', '.join(names)}"
            )
    return list(named or usual)


@contextmanager
def terminable() -> Iterator[None]:
    """While open, SIGTERM is what Ctrl-C is: what was measured is printed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How much is measured, and where the rows go.

    quick: a subset, in a minute or two
    json: print each row as an object, with machine and versions
    out: folder for charts (PNG)
    """

    quick: bool = False
    json: bool = False
    threads: int | None = None
    out: Path | None = None

    def effort(self, usual: "Effort") -> "Effort":
        """How long each row is measured."""
        from headway_lab.bench.measure import QUICK

        return QUICK if self.quick else usual

    def show(self, rows: "Iterable[Row]") -> int:
        """Print the rows as they come, on stdout (JSON) or on stderr, and together as a table, also where Ctrl-C or
        SIGTERM ends them. The exit code is 1 where a peer gave another result than
        headway, or nothing could be measured."""
        set_threads(self.threads)
        from headway_lab.bench import rows as results
        from headway_lab.bench.charts import draw
        from headway_lab.bench.measure import mismatches

        done: list[Row] = []
        try:
            with terminable():
                for row in rows:
                    done.append(row)
                    if self.json:
                        print(row.to_line(), flush=True)
                    else:
                        note(f"  {row.summary()}")
        finally:
            if done and not self.json:
                print(results.to_text(done), flush=True)
            if done and self.out is not None:
                note("written: " + ", ".join(map(str, draw(done, self.out))))
        wrong = mismatches(done)
        if all(row.ours_ms is None for row in done):
            wrong.append("nothing could be measured; each row says why")
        for line in wrong:
            report_error(line)
        return 1 if wrong else 0


@dataclass(frozen=True, kw_only=True)
class ModelsRun(Run):
    """A bench of whole decoders, with weights kept in several ways.

    model: tiny, 32m or 1.1b, LLaMAs, moe-166m or hybrid-0.8b (repeatable) [default: 32m and 1.1b; 32m with --quick]
    weights: bf16, int8, int4, q4_K, q5_K, q6_K, nf4, int8-row (one scale a row) or compressed (bf16 without
        loss); repeatable [default: bf16, int8, int4, as far as they apply]
    """

    model: list[str] | None = None
    weights: list[str] | None = None

    def models(self, *more: str) -> list[str]:
        """The models that are named, or the usual ones. `more`: those of this bench alone."""
        from headway_lab.bench.models import DECODERS

        usual = ("32m",) if self.quick else ("32m", "1.1b", *more)
        return chosen(self.model, (*DECODERS, *more), usual, "model")

    def kinds(self, usual: tuple[str, ...]) -> list[str]:
        """The weights that are named, or the usual ones."""
        from headway_lab.bench.models import WEIGHTS

        return chosen(self.weights, WEIGHTS, usual, "kind of weights")
