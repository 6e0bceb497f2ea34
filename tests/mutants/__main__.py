"""Applies handwritten mutants to the code, one at a time, and checks that tests fail: `make mutants`.

    python tests/mutants [NAME ...] [--list] [-j WORKERS]

Each area has a table beside this file, with an entry for each mutant and blank lines between entries:

    name  file that is changed  tests that must fail (node ids of pytest, or files) ...
    -the old text, which must occur exactly once
    +the new text

Text of several lines has several lines of each sign. A mutant is applied to a copy of the checkout, and its tests run
there, slow ones too. Outcomes: killed (a test fails), lived (the tests pass, or do not end within `LIMIT` seconds),
broken (the tests end otherwise: an import fails, a fixture raises, a test is skipped), or stale (the old text does not
occur exactly once: the code has moved, and the mutant must be adapted). All tests must be collected, and pass without
skips on a copy without mutants. A mutant of the kernels is compiled for one CPU level, which the names of its tests
have in brackets, and is left out if the CPU lacks it. The exit code is 0 if none lived and none is stale.
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
    """Replaces `old` in `file` by `new`, after which `tests` must fail."""

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
        """The CPU level that the kernels are compiled for: the last parameter of the first test's id."""
        return re.split(r"[-\[\]]", self.tests[0])[-2]

    @property
    def stale(self) -> str | None:
        """The reason why it cannot be applied to the checkout; None if it can."""
        path = ROOT / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        return None if count == 1 else f"stale: the old text is {count} times in {self.file}"


def read(folder: Path) -> list[Mutant]:
    """Returns the mutants of all tables. Asserts that entries are well formed and names unique."""
    mutants = []
    tables = "\n\n".join(path.read_text().strip() for path in sorted(folder.glob("*.txt")))
    for entry in tables.split("\n\n"):
        first, *lines = entry.splitlines()
        name, file, *tests = first.split()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        assert {line[0] for line in lines} <= {"-", "+"}, f"lines begin with - or +: {entry}"
        assert tests and old and old != new, f"tests, an old and a new text are needed: {entry}"  # noqa: PT018
        mutants.append(Mutant(name, file, tuple(tests), old, new))
        assert not mutants[-1].of_kernels or "[" in tests[0], (
            f"the first test's last parameter is a level: {entry}"
        )
    assert len({m.name for m in mutants}) == len(mutants), "two mutants have one name"
    return mutants


def copy(source: Path, target: Path) -> Path:
    """Copies the parts of a checkout that tests need, with compiled Python files, which record their source's time."""
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        else:
            shutil.copy2(source / name, target / name)
    return target


def python(where: Path, *arguments: str, limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python on the package of a copy, on one thread."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        env={
            **os.environ,
            **one_thread,
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
    """Returns the outcome of a mutant, followed by details."""
    with tempfile.TemporaryDirectory(prefix="headway-mutant-") as scratch:
        checkout = copy(clean, Path(scratch))
        path = checkout / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        if mutant.of_kernels:
            shutil.rmtree(checkout / "src/headway/native/lib", ignore_errors=True)
            build = python(checkout, "-m", "headway.native.build", "--level", mutant.level)
            if build.returncode:
                return f"broken: it does not compile\n{build.stdout}"
        try:
            process = python(checkout, *PYTEST, *TRIED, *mutant.tests, limit=LIMIT)
        except subprocess.TimeoutExpired:
            return f"lived: no answer in {LIMIT:g} s"
    return verdict(mutant, process.returncode, process.stdout)


def verdict(mutant: Mutant, code: int, output: str) -> str:
    """Returns the outcome of a mutant whose tests ended with exit code `code`. Only a test that failed kills it: not an
    import error, a fixture that raises, or a skipped test."""
    if not code:
        return f"lived: {' '.join(mutant.tests)} passed"
    failed = re.findall(r"^FAILED \S+?::(\S+)", output, re.MULTILINE)
    if code != 1 or not failed or "skipped, which --no-skips forbids" in output:
        return f"broken: no test failed, and pytest ended with {code}\n{output}"
    return f"killed by {failed[0]}"


def not_collected(mutants: list[Mutant], collected: Iterable[str]) -> list[str]:
    """Returns the mutants' tests that were not collected. For mutants of kernels only the test functions must be there,
    since this CPU may lack the level in the test's parameters."""
    names = {name for test in collected for name in named_by(test)}
    return [
        f"{mutant.name}: {test}"
        for mutant in mutants
        for test in mutant.tests
        if (test.partition("[")[0] if mutant.of_kernels else test) not in names
    ]


def named_by(test: str) -> list[str]:
    """Returns the ways to name a collected test: with and without parameters, by its class, and by its file."""
    parts = test.partition("[")[0].split("::")
    return [test, *("::".join(parts[:count]) for count in range(1, len(parts) + 1))]


def run(mutants: list[Mutant], workers: int) -> int:
    """Tries all mutants and prints a line for each; returns how many were not killed."""

    def timed(mutant: Mutant) -> tuple[Mutant, str, float]:
        began = time.monotonic()
        return mutant, trial(mutant, clean), time.monotonic() - began

    with tempfile.TemporaryDirectory(prefix="headway-mutants-") as scratch:
        clean = copy(ROOT, Path(scratch))
        levels = python(clean, "-c", LEVELS_HERE).stdout.split()
        applicable = [m for m in mutants if not m.of_kernels or m.level in levels]
        tests = dict.fromkeys(test for mutant in applicable for test in mutant.tests)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        listed = python(clean, *PYTEST, "--collect-only", *files).stdout.splitlines() if applicable else []
        if lost := not_collected(applicable, listed):
            sys.exit("pytest does not collect:\n" + "\n".join(lost))
        base = python(clean, *PYTEST, *TRIED, *tests) if applicable else None
        if base and base.returncode:
            sys.exit(f"the tests do not pass where nothing is broken:\n{base.stdout}")
        bad = 0
        with ThreadPoolExecutor(workers) as pool:
            for mutant, outcome, seconds in pool.map(timed, applicable):
                bad += not outcome.startswith("killed")
                print(f"{mutant.name:28} {seconds:5.1f} s  {outcome}", flush=True)
    for mutant in mutants:
        if mutant not in applicable:
            print(f"{mutant.name:28}          left out: this CPU has no {mutant.level}")
    print(f"{len(applicable) - bad} of {len(applicable)} killed")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument(
        "--list", action="store_true", help="names, files and tests; only stale ones are looked for"
    )
    parser.add_argument("-j", type=int, default=1, metavar="WORKERS", help="mutants at a time")
    arguments = parser.parse_args()
    mutants = read(TABLES)
    if unknown := set(arguments.names) - {m.name for m in mutants}:
        parser.error(f"no mutant is called {', '.join(sorted(unknown))}; --list has the names")
    mutants = [m for m in mutants if m.name in arguments.names or not arguments.names]
    if arguments.list:
        print(*(f"{m.name:28} {m.file}  {' '.join(m.tests)}" for m in mutants), sep="\n")
    stale = [m for m in mutants if m.stale]
    bad = 0 if arguments.list else run([m for m in mutants if m not in stale], arguments.j)
    for mutant in stale:
        print(f"{mutant.name:28}          {mutant.stale}")
    return int(bool(bad or stale))


if __name__ == "__main__":
    sys.exit(main())
