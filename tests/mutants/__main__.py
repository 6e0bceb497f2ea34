"""Breaks the code by hand, one place at a time, and looks whether the tests see it: `make mutants`.

    python tests/mutants [NAME ...] [--list] [-j WORKERS]

Each room has a table beside this file, with an entry for each mutant and a blank line between two:

    name  file that is changed  tests that must fail (node ids of pytest, or files) ...
    -the old text, which must be there exactly once
    +the new text

Text of several lines has several lines of each sign. A mutant is applied to a copy of the checkout, and its tests run
there, slow ones too: killed (a test fails), lived (they pass, or give no answer in `LIMIT` seconds), broken (they end
otherwise: nothing can be imported, a fixture raises, a test is skipped), or stale (the old text is not there once: the
code has moved, and the mutant must move with it). All of them must be collected, and pass on a copy without any mutant,
where none may be skipped. A mutant of the kernels is compiled for one CPU level, which the names of its tests have in
brackets, and left out where the CPU lacks it. Exit code 0 where none lived and none is stale.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).resolve().parent
ROOT = TABLES.parent.parent
COPIED = (
    "src",
    "tests",
    "docs",
    "recipes",
    "packages",
    "bench",
    "README.md",
    "README.zh.md",
    "CONTRIBUTING.md",
    "Makefile",
    "pyproject.toml",
)
LIMIT = 240.0
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "--no-header", "--slow", "--hypothesis-profile=fast")
TRIED = ("-x", "--no-skips", "--tb=line")
LEVELS_HERE = """
from headway.native.levels import of_this_machine
print(*of_this_machine())
"""


@dataclass(frozen=True)
class Mutant:
    """`old` in `file` becomes `new`; `tests` must fail then."""

    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    @property
    def of_kernels(self) -> bool:
        return self.file.endswith((".h", ".cpp"))

    @property
    def level(self) -> str:
        """The CPU level that the kernels are compiled for: the last parameter of the first test."""
        return re.split(r"[-\[\]]", self.tests[0])[-2]

    @property
    def stale(self) -> str | None:
        """Why it cannot be applied to the checkout."""
        path = ROOT / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        return None if count == 1 else f"stale: the old text is {count} times in {self.file}"


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
        assert not found[-1].of_kernels or "[" in tests[0], (
            f"the first test's last parameter is a level: {entry}"
        )
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


def python(where: Path, *arguments: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """A run of Python on the package of a copy, on one thread."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        env={
            **os.environ,
            **one,
            "PYTHONPATH": str(where / "src"),
            "HEADWAY_BUILD": "require",
            "HEADWAY_DATA": os.environ.get("HEADWAY_DATA") or str(ROOT.parent / "shared/data"),
        },
        timeout=limit,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trial(mutant: Mutant, clean: Path) -> str:
    """What became of a mutant: a word or more, and details."""
    with tempfile.TemporaryDirectory(prefix="headway-mutant-") as scratch:
        where = copy(clean, Path(scratch))
        path = where / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        if mutant.of_kernels:
            shutil.rmtree(where / "src/headway/native/lib", ignore_errors=True)
            built = python(where, "-m", "headway.native.build", "--level", mutant.level)
            if built.returncode:
                return f"broken: it does not compile\n{built.stdout}"
        try:
            done = python(where, *PYTEST, *TRIED, *mutant.tests, limit=LIMIT)
        except subprocess.TimeoutExpired:
            return f"lived: no answer in {LIMIT:g} s"
    return verdict(mutant, done.returncode, done.stdout)


def verdict(mutant: Mutant, code: int, said: str) -> str:
    """What became of a mutant whose tests ended with `code`. It is killed by a test that failed, and by nothing else:
    not by a module that cannot be imported, a fixture that raises, or a test that was skipped."""
    if not code:
        return f"lived: {' '.join(mutant.tests)} passed"
    failed = re.findall(r"^FAILED \S+?::(\S+)", said, re.MULTILINE)
    if code != 1 or not failed or "skipped, which --no-skips forbids" in said:
        return f"broken: no test failed, and pytest ended with {code}\n{said}"
    return f"killed by {failed[0]}"


def not_collected(mutants: list[Mutant], collected: Iterable[str]) -> list[str]:
    """The tests of mutants that are not among those collected. Kernels are compiled for levels that this CPU may lack:
    of their tests the functions count."""
    found = {name for test in collected for name in named_by(test)}
    return [
        f"{mutant.name}: {test}"
        for mutant in mutants
        for test in mutant.tests
        if (test.partition("[")[0] if mutant.of_kernels else test) not in found
    ]


def named_by(test: str) -> list[str]:
    """A collected test with its parameters and without, its class, and its file."""
    parts = test.partition("[")[0].split("::")
    return [test, *("::".join(parts[:count]) for count in range(1, len(parts) + 1))]


def run(mutants: list[Mutant], workers: int) -> int:
    """Tries all, a line for each; the number of those that were not killed."""

    def timed(mutant: Mutant) -> tuple[Mutant, str, float]:
        began = time.monotonic()
        return mutant, trial(mutant, clean), time.monotonic() - began

    with tempfile.TemporaryDirectory(prefix="headway-mutants-") as scratch:
        clean = copy(ROOT, Path(scratch))
        here = python(clean, "-c", LEVELS_HERE).stdout.split()
        able = [m for m in mutants if not m.of_kernels or m.level in here]
        tests = dict.fromkeys(test for mutant in able for test in mutant.tests)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        listed = python(clean, *PYTEST, "--collect-only", *files).stdout.splitlines() if able else []
        if lost := not_collected(able, listed):
            sys.exit("pytest does not collect:\n" + "\n".join(lost))
        base = python(clean, *PYTEST, *TRIED, *tests) if able else None
        if base and base.returncode:
            sys.exit(f"the tests do not pass where nothing is broken:\n{base.stdout}")
        bad = 0
        with ThreadPoolExecutor(workers) as pool:
            for mutant, outcome, seconds in pool.map(timed, able):
                bad += not outcome.startswith("killed")
                print(f"{mutant.name:28} {seconds:5.1f} s  {outcome}", flush=True)
    for mutant in mutants:
        if mutant not in able:
            print(f"{mutant.name:28}          left out: this CPU has no {mutant.level}")
    print(f"{len(able) - bad} of {len(able)} killed")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument(
        "--list", action="store_true", help="names, files and tests; only stale ones are looked for"
    )
    parser.add_argument("-j", type=int, default=1, metavar="WORKERS", help="mutants at a time")
    given = parser.parse_args()
    mutants = read(TABLES)
    if unknown := set(given.names) - {m.name for m in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}; --list has the names")
    mutants = [m for m in mutants if m.name in given.names or not given.names]
    if given.list:
        print(*(f"{m.name:28} {m.file}  {' '.join(m.tests)}" for m in mutants), sep="\n")
    stale = [m for m in mutants if m.stale]
    bad = 0 if given.list else run([m for m in mutants if m not in stale], given.j)
    for mutant in stale:
        print(f"{mutant.name:28}          {mutant.stale}")
    return int(bool(bad or stale))


if __name__ == "__main__":
    sys.exit(main())
