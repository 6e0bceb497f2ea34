"""Draws random faults from all of `src`, one place of the code each, and checks whether a test notices them.

    python -m tests.mutants.drawn map                    records which test runs which line; updates changed tests only
    python -m tests.mutants.drawn run --seed SEED        tries 400 faults, 80 of them in the kernels; resumes if stopped
    python -m tests.mutants.drawn run --again FILE       retries the faults that lived, with the tests of today
    python -m tests.mutants.drawn list --seed SEED       lists the faults that would be tried
    python -m tests.mutants.drawn report FILE            prints the table of a file of results and what lived

A fault is killed if a test fails that passes without it, or if the tests do not end in time. It is tried against the
tests that run its line, the nearest first, as many as take a minute without a fault.
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
        command = verbs.add_parser(verb)
        if verb != "report":
            command.add_argument(
                "--cache", type=Path, default=ROOT / ".mutants", help="folder of maps and copies"
            )
        if verb in ("map", "run"):
            command.add_argument("-j", type=int, default=1, metavar="WORKERS", help="processes at a time")
        if verb in ("run", "list"):
            command.add_argument("--seed", help="any text: it decides the list, for a given tree")
            command.add_argument("--again", type=Path, metavar="FILE", help="what lived in a file of results")
            command.add_argument("--ids", nargs="+", default=[], metavar="ID", help="of the list only these")
            command.add_argument("--count", type=int, default=400, help="faults in all [400]")
            command.add_argument("--cpp", type=int, default=80, help="of them of the kernels [80]")
            command.add_argument("--only", default="", metavar="PATH", help="only files below src/...")
            command.add_argument("--out", type=Path, help="file of results [CACHE/SEED.jsonl]")
        if verb == "run":
            command.add_argument(
                "--budget", type=float, default=BUDGET, help="seconds of a fault's tests without it [60]"
            )
            command.add_argument("--hours", type=float, default=6.0, help="begin no fault later [6]")
        if verb == "report":
            command.add_argument("file", type=Path)
        if verb in ("run", "report"):
            command.add_argument(
                "--equivalent", type=Path, metavar="FILE", help="lines: id, why it changes nothing"
            )
    namespace = parser.parse_args(words)
    if namespace.verb in ("run", "list") and (namespace.seed is None) == (namespace.again is None):
        parser.error("one of --seed and --again is needed")
    return namespace


def drawn(options: argparse.Namespace) -> tuple[list[Fault], list[Fault]]:
    """Returns the faults of Python files, and those of the kernels in the order to try them. A list that was begun is
    resumed even if the tree has changed since: the file `.list` beside its results has the ids."""
    if options.again:
        ids = [key for key, row in Results(options.again).rows().items() if row["outcome"] == "lived"]
    elif (list_file := listed(options)).exists():
        ids = list_file.read_text().split()
    else:
        compiled = Map(options.cache, ROOT).compiled() if options.cpp else ()
        faults = draw.draw(ROOT, options.seed, options.count - options.cpp, options.only)
        faults += draw.draw_cpp(ROOT, options.seed, compiled, options.only)
        ids = [fault.id for fault in faults]
        if options.verb == "run" and not options.ids:
            list_file.parent.mkdir(parents=True, exist_ok=True)
            list_file.write_text("\n".join(ids))
    faults = draw.named(ROOT, [key for key in ids if key in options.ids or not options.ids])
    if not options.ids and len(faults) < len(ids):
        print(
            f"{len(ids) - len(faults)} of {len(ids)} places are gone: their lines have changed",
            file=sys.stderr,
        )
    return [f for f in faults if not f.of_kernels], [f for f in faults if f.of_kernels]


def results_file(options: argparse.Namespace) -> Path:
    out: Path = options.again or options.out or options.cache / f"{options.seed}.jsonl"
    return out


def listed(options: argparse.Namespace) -> Path:
    return results_file(options).with_suffix(".list")


def run(options: argparse.Namespace) -> int:
    python, cpp = drawn(options)
    out = results_file(options)
    results = Results(out)
    rows = {} if options.again or options.ids else results.rows()
    queue = Queue(python, cpp, len(cpp) if options.again or options.ids else options.cpp, rows)
    tries = Run(ROOT, options.cache, results, options.hours, options.budget)
    if tries.failing:
        print(
            f"{len(tries.failing)} tests fail without any fault and are not asked:",
            *sorted(tries.failing),
            sep="\n  ",
        )
    if stale := tries.map.stale():
        print(f"{len(stale)} files have changed since the map was made; their lines are carried over")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT otherwise
    try:
        tries.go(options.j, queue, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on, {out} has what was tried")
        return 130
    print(report.text([*results.rows().values()], report.reasons(options.equivalent)))
    return 0


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.verb == "map":
        record.make(options.cache, options.j)
    elif options.verb == "run":
        return run(options)
    elif options.verb == "list":
        python, cpp = drawn(options)
        print(*(f"{fault.id:10} {fault}" for fault in (*python, *cpp[: options.cpp])), sep="\n")
    else:
        print(report.text([*Results(options.file).rows().values()], report.reasons(options.equivalent)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
