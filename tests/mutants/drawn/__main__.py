"""Draws faults from all of `src`, one place of the code at a time, and looks whether a test notices each.

    python -m tests.mutants.drawn map                    which test runs which line; renewed for tests that changed
    python -m tests.mutants.drawn run --seed SEED        400 faults, 80 of them of the kernels; goes on where it ended
    python -m tests.mutants.drawn run --again FILE       what lived in a file of results once more, by its tests of now
    python -m tests.mutants.drawn list --seed SEED       the faults that would be tried
    python -m tests.mutants.drawn report FILE            the table of a file of results, and what lived

A fault is killed where a test fails that passes without it, or where nothing answers in time. It is tried against the
tests that run its line, those beside it first, as many as take a minute without a fault.
"""

import argparse
import signal
import sys
from pathlib import Path

from tests.mutants.__main__ import ROOT
from tests.mutants.drawn import draw, record, report
from tests.mutants.drawn.cover import Map
from tests.mutants.drawn.fault import Fault
from tests.mutants.drawn.score import BUDGET, Queue, Results, Run


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.drawn", description=__doc__.splitlines()[0]
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("map", "run", "list", "report"):
        one = verbs.add_parser(verb)
        if verb != "report":
            one.add_argument(
                "--cache", type=Path, default=ROOT / ".mutants", help="folder of maps and copies"
            )
        if verb in ("map", "run"):
            one.add_argument("-j", type=int, default=1, metavar="WORKERS", help="processes at a time")
        if verb in ("run", "list"):
            one.add_argument("--seed", help="any text: it decides the list, for a given tree")
            one.add_argument("--again", type=Path, metavar="FILE", help="what lived in a file of results")
            one.add_argument("--ids", nargs="+", default=[], metavar="ID", help="of the list only these")
            one.add_argument("--count", type=int, default=400, help="faults in all [400]")
            one.add_argument("--cpp", type=int, default=80, help="of them of the kernels [80]")
            one.add_argument("--only", default="", metavar="PATH", help="only files below src/...")
            one.add_argument("--out", type=Path, help="file of results [CACHE/SEED.jsonl]")
        if verb == "run":
            one.add_argument(
                "--budget", type=float, default=BUDGET, help="seconds of a fault's tests without it [60]"
            )
            one.add_argument("--hours", type=float, default=6.0, help="begin no fault later [6]")
        if verb == "report":
            one.add_argument("file", type=Path)
        if verb in ("run", "report"):
            one.add_argument(
                "--equivalent", type=Path, metavar="FILE", help="lines: id, why it changes nothing"
            )
    given = parser.parse_args(words)
    if given.verb in ("run", "list") and (given.seed is None) == (given.again is None):
        parser.error("one of --seed and --again is needed")
    return given


def drawn(given: argparse.Namespace) -> tuple[list[Fault], list[Fault]]:
    """Python's faults, and an order in which those of the kernels are tried. A list that was begun is gone on with,
    also where the tree has changed since: `.list` beside its results has the ids."""
    if given.again:
        ids = [key for key, row in Results(given.again).rows().items() if row["outcome"] == "lived"]
    elif (kept := listed(given)).exists():
        ids = kept.read_text().split()
    else:
        compiled = Map(given.cache, ROOT).compiled() if given.cpp else ()
        faults = draw.draw(ROOT, given.seed, given.count - given.cpp, given.only)
        faults += draw.draw_cpp(ROOT, given.seed, compiled, given.only)
        ids = [fault.id for fault in faults]
        if given.verb == "run" and not given.ids:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text("\n".join(ids))
    faults = draw.named(ROOT, [key for key in ids if key in given.ids or not given.ids])
    if not given.ids and len(faults) < len(ids):
        print(
            f"{len(ids) - len(faults)} of {len(ids)} places are gone: their lines have changed",
            file=sys.stderr,
        )
    return [f for f in faults if not f.of_kernels], [f for f in faults if f.of_kernels]


def results_file(given: argparse.Namespace) -> Path:
    out: Path = given.again or given.out or given.cache / f"{given.seed}.jsonl"
    return out


def listed(given: argparse.Namespace) -> Path:
    return results_file(given).with_suffix(".list")


def run(given: argparse.Namespace) -> int:
    python, cpp = drawn(given)
    out = results_file(given)
    results = Results(out)
    rows = {} if given.again or given.ids else results.rows()
    queue = Queue(python, cpp, len(cpp) if given.again or given.ids else given.cpp, rows)
    tries = Run(ROOT, given.cache, results, given.hours, given.budget)
    if tries.failing:
        print(
            f"{len(tries.failing)} tests fail without any fault and are not asked:",
            *sorted(tries.failing),
            sep="\n  ",
        )
    if stale := tries.map.stale():
        print(f"{len(stale)} files have changed since the map was made; their lines are carried over")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        tries.go(given.j, queue, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on, {out} has what was tried")
        return 130
    print(report.text([*results.rows().values()], report.reasons(given.equivalent)))
    return 0


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    if given.verb == "map":
        record.make(given.cache, given.j)
    elif given.verb == "run":
        return run(given)
    elif given.verb == "list":
        python, cpp = drawn(given)
        print(*(f"{fault.id:10} {fault}" for fault in (*python, *cpp[: given.cpp])), sep="\n")
    else:
        print(report.text([*Results(given.file).rows().values()], report.reasons(given.equivalent)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
