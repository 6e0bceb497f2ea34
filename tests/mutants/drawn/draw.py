"""Draws faults from all of `src`: a random line, then one of its places. Tree and seed determine the result."""

import random
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

from tests.mutants.drawn import cpp_faults, python_faults
from tests.mutants.drawn.fault import Fault

ROOTS = ("src/headway", "src/headway_lab")
CSRC = "src/headway/native/csrc"


def python_files(root: Path, only: str = "") -> list[str]:
    paths = (path.relative_to(root).as_posix() for top in ROOTS for path in (root / top).rglob("*.py"))
    return sorted(path for path in paths if path.startswith(only))


def cpp_files(root: Path, only: str = "") -> list[str]:
    paths = (
        path.relative_to(root).as_posix() for path in (root / CSRC).iterdir() if path.suffix in (".h", ".cpp")
    )
    return sorted(path for path in paths if path.startswith(only))


def draw(root: Path, seed: str, count: int, only: str = "") -> list[Fault]:
    """Returns `count` faults of Python files, at most one in each line; fewer if lines run out."""
    sources = {file: (root / file).read_bytes() for file in python_files(root, only)}
    faults = [fault for file, source in sources.items() for fault in python_faults.faults(file, source)]
    drawn = []
    for fault in shuffled(faults, f"python {seed}"):
        if len(drawn) == count:
            break
        if python_faults.changes(sources[fault.file], fault.apply(sources[fault.file])):
            drawn.append(fault)
    return drawn


def draw_cpp(root: Path, seed: str, compiled: Collection[tuple[str, int]], only: str = "") -> list[Fault]:
    """Returns one fault for each line in `compiled` (file name, number), in the order to try them."""
    faults = [
        f for file in cpp_files(root, only) for f in cpp_faults.faults(file, (root / file).read_bytes())
    ]
    return shuffled([f for f in faults if (Path(f.file).name, f.line) in compiled], f"c++ {seed}")


def shuffled(faults: list[Fault], seed: str) -> list[Fault]:
    """Returns one fault for each line, lines in random order: a line counts once, however many places it has."""
    lines = defaultdict[tuple[str, int], list[Fault]](list)
    for fault in faults:
        lines[fault.file, fault.line].append(fault)
    chance = random.Random(seed)
    order = sorted(lines)
    chance.shuffle(order)
    return [chance.choice(lines[line]) for line in order]


def named(root: Path, ids: Collection[str]) -> list[Fault]:
    """Returns the faults with these ids in their order; ids that the tree no longer has are left out."""
    faults: dict[str, Fault] = {}
    for file in (*python_files(root), *cpp_files(root)):
        of_file = python_faults.faults if file.endswith(".py") else cpp_faults.faults
        faults |= {fault.id: fault for fault in of_file(file, (root / file).read_bytes())}
    return [faults[key] for key in ids if key in faults]
