"""Breaks the code by hand, one place at a time, and looks whether the tests see it: `make mutants`.

    python tests/mutants [NAME ...] [--list] [-j WORKERS]

Each room has a table beside this file, with an entry for each mutant and a blank line between two:

    name  file that is changed  tests that must fail (node ids of pytest, or files) ...
    -the old text, which must be there exactly once
    +the new text

Text of several lines has several lines of each sign. A mutant is applied to a copy of the checkout, and its tests run
there: killed (they fail), lived (they pass), or stale (the old text is not there once: the code has moved, and the
mutant must move with it). The same tests must pass on a copy without any mutant, and none of them may be skipped. A
run beyond `LIMIT` seconds is not a kill. A mutant of the kernels is compiled for one CPU level, which the names of its
tests have in brackets. Exit code 0 where all were killed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).resolve().parent
ROOT = TABLES.parent.parent
COPIED = ("src", "tests", "docs", "README.md", "pyproject.toml")
LIMIT = 300.0
LEVELS = ("portable", "avx2", "avx512", "avx512bf16")
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--no-skips", "--tb=line")


@dataclass(frozen=True)
class Mutant:
    """`old` in `file` becomes `new`; `tests` must fail then."""

    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    @property
    def level(self) -> str | None:
        """The CPU level that the kernels are compiled for; None where they stay as they are."""
        if not self.file.endswith((".h", ".cpp")):
            return None
        words = "".join(self.tests).replace("]", "-").split("-")
        return next(level for level in LEVELS if level in words)


def read(folder: Path) -> list[Mutant]:
    """The mutants of all tables, each name once."""
    found = []
    tables = "\n\n".join(path.read_text().strip() for path in sorted(folder.glob("*.txt")))
    for entry in tables.split("\n\n"):
        first, *lines = entry.splitlines()
        name, file, *tests = first.split()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        assert {line[0] for line in lines} <= {"-", "+"}, f"lines begin with - or +: {entry}"
        assert tests and old and old != new, f"tests, an old and a new text are needed: {entry}"  # noqa: PT018
        found.append(Mutant(name, file, tuple(tests), old, new))
    assert len({m.name for m in found}) == len(found), "two mutants have one name"
    return found


def copy(source: Path, target: Path) -> Path:
    """The parts of a checkout that tests need; compiled Python files too, which know what they were made from."""
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        else:
            shutil.copy2(source / name, target / name)
    return target


def python(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of Python on the package of a copy, one thread, at most `LIMIT` seconds."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    variables = {**os.environ, **one, "PYTHONPATH": str(where / "src"), "HEADWAY_BUILD": "require"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=where,
        env=variables,
        timeout=LIMIT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trial(mutant: Mutant, clean: Path) -> str:
    """ "killed by" the first test that failed, or what is wrong: a line or more."""
    with tempfile.TemporaryDirectory(prefix="headway-mutant-") as scratch:
        where = copy(clean, Path(scratch))
        path = where / mutant.file
        before = path.read_text() if path.is_file() else ""
        if before.count(mutant.old) != 1:
            return f"stale: the old text is {before.count(mutant.old)} times in {mutant.file}"
        path.write_text(before.replace(mutant.old, mutant.new))
        try:
            if mutant.level:
                shutil.rmtree(where / "src/headway/native/lib", ignore_errors=True)
                built = python(where, "-m", "headway.native.build", "--level", mutant.level)
                if built.returncode:
                    return f"broken: it does not compile\n{built.stdout}"
            done = python(where, *PYTEST, *mutant.tests)
        except subprocess.TimeoutExpired:
            return f"lived: no answer in {LIMIT:g} s"
    if done.returncode not in (0, 1):
        return f"broken: pytest ended with {done.returncode}\n{done.stdout}"
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
    return f"killed by {failed[0]}" if done.returncode else f"lived: {' '.join(mutant.tests)} passed"


def baseline(mutants: list[Mutant], clean: Path) -> str | None:
    """The tests of all mutants where nothing is broken; what they say where they do not pass."""
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    done = python(clean, *PYTEST, *tests)
    return done.stdout if done.returncode else None


def results(mutants: list[Mutant], workers: int) -> Iterator[tuple[Mutant, str, float]]:
    """(mutant, outcome, seconds) in the order of the table."""

    def timed(mutant: Mutant) -> tuple[Mutant, str, float]:
        began = time.monotonic()
        return mutant, trial(mutant, clean), time.monotonic() - began

    with (
        tempfile.TemporaryDirectory(prefix="headway-mutants-") as scratch,
        ThreadPoolExecutor(workers) as pool,
    ):
        clean = copy(ROOT, Path(scratch))
        wrong = baseline(mutants, clean)
        if wrong:
            sys.exit(f"the tests do not pass where nothing is broken:\n{wrong}")
        yield from pool.map(timed, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--list", action="store_true", help="names, files and tests; nothing is run")
    parser.add_argument("-j", type=int, default=1, metavar="WORKERS", help="mutants at a time")
    given = parser.parse_args()
    mutants = read(TABLES)
    if unknown := set(given.names) - {m.name for m in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}; --list has the names")
    mutants = [m for m in mutants if m.name in given.names or not given.names]
    if given.list:
        print(*(f"{m.name:28} {m.file}  {' '.join(m.tests)}" for m in mutants), sep="\n")
        return 0
    bad = 0
    for mutant, outcome, seconds in results(mutants, given.j):
        bad += not outcome.startswith("killed")
        print(f"{mutant.name:28} {seconds:5.1f} s  {outcome}", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} killed")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
