"""Records the map of which test runs which line, outside the repository, and updates it for tests that changed.

A map is a folder of generations, each with a copy of the sources, the database of coverage (`lines`), and `tests.json`.
The first has all tests; later ones have the test files that are new or have changed since.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.mutants.__main__ import ROOT, copy
from tests.mutants.drawn import kernels, recorder
from tests.mutants.drawn.draw import CSRC

SETTINGS = """[run]
include = {tree}/src/*
parallel = true
data_file = {out}/data/lines
context = ${{{test}-}}
patch = _exit
disable_warnings = no-data-collected,module-not-measured,couldnt-parse,trace-changed
"""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg", "HEADWAY_BUILD": "require",
    "HEADWAY_DATA": os.environ.get("HEADWAY_DATA") or str(ROOT.parent / "shared/data"),
}  # fmt: skip
"""Environment of tests in a copy of the checkout, with the same data as in the checkout."""


def generations(cache: Path) -> list[Path]:
    """Returns the folders of a map, the oldest first."""
    return sorted((path.parent for path in cache.glob("map/*/tests.json")), key=lambda path: int(path.name))


def test_files(root: Path) -> dict[str, str]:
    """Returns the hash of each test file."""
    paths = sorted((root / "tests").rglob("test_*.py"))
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in paths
    }


def changed(cache: Path) -> list[str]:
    """Returns the test files that are new or changed since the map was made."""
    known: dict[str, str] = {}
    for folder in generations(cache):
        known |= json.loads((folder / "tests.json").read_text())["files"]
    return [file for file, key in test_files(ROOT).items() if known.get(file) != key]


def make(cache: Path, workers: int) -> None:
    """Runs the tests that the map lacks, and records which lines they run."""
    files = changed(cache)
    if not files:
        print("the map has all tests")
        return
    first = not generations(cache)
    out = cache / "map" / str(len(generations(cache)))
    shutil.rmtree(out, ignore_errors=True)
    (out / "data").mkdir(parents=True)
    print(f"the map lacks {len(files)} test files: {out}", flush=True)
    tree = copy(ROOT, out / "tree")
    library = kernels.noting(cache)
    run(tree, out, library, workers, [] if first else files)
    finish(out, files, library)


def run(tree: Path, out: Path, library: Path, workers: int, files: list[str]) -> None:
    """Runs the tests of some files (all if the list is empty) under the recorder."""
    (out / "settings").write_text(SETTINGS.format(tree=tree, out=out, test=recorder.TEST))
    environment = {
        "PYTHONPATH": str(tree / "src"), recorder.OUT: str(out), recorder.KERNELS: str(library),
        "HEADWAY_NATIVE_DIR": str(library.parent), "COVERAGE_PROCESS_START": str(out / "settings"),
    }  # fmt: skip
    flags = (
        "-p",
        "tests.mutants.drawn.recorder",
        "-p",
        "no:cacheprovider",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *files],
        cwd=tree,
        env={**os.environ, **ONE_THREAD, **environment},
    )


def finish(out: Path, files: list[str], library: Path) -> None:
    """Joins the records of all processes, and keeps what the map needs."""
    command = [sys.executable, "-m", "coverage", "combine", "--quiet", f"--rcfile={out / 'settings'}"]
    subprocess.run(command, check=True, cwd=out)
    tests: dict[str, dict[str, Any]] = {}
    for path in out.glob("tests-*.json"):
        tests |= json.loads(path.read_text())
    hashes = test_files(out / "tree")
    kernel_lines = lines_of_kernels(tests, library)
    for facts in tests.values():
        facts.pop("blocks", None)
    (out / "kernels.json").write_text(json.dumps(kernel_lines, separators=(",", ":")))
    shutil.copytree(out / "tree/src", out / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    facts = {"files": {file: hashes[file] for file in files if file in hashes}, "tests": tests}
    shutil.rmtree(out / "tree")
    for path in out.glob("tests-*.json"):
        path.unlink()
    (out / "tests.json").write_text(json.dumps(facts))


def lines_of_kernels(tests: dict[str, dict[str, Any]], library: Path) -> dict[str, Any]:
    """Returns `tests` (names) and `lines`: for each kernel file and each of its lines with code, the indices in
    `tests` of the tests that run it."""
    blocks = kernels.lines_of_blocks(library)
    kernel_files = {path.name for path in (ROOT / CSRC).iterdir()}
    lines: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for file, line in set().union(*blocks.values()):
        if file in kernel_files:
            lines[file][str(line)] = []
    for number, facts in enumerate(tests.values()):
        for file, line in set().union(*(blocks.get(block, set()) for block in facts.get("blocks", ()))):
            if file in kernel_files:
                lines[file][str(line)].append(number)
    return {"tests": [*tests], "lines": lines}
