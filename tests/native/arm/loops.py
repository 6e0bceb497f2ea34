"""Counts, in the disassembly of a level's library, the multiply-add instructions of the inner loops of its products,
beside those that their useful multiply-adds need: at most `MOST` times as many, and there must be such loops.

    python -m tests.native.arm.loops LIBRARY LEVEL

An inner loop is code between a backward jump and where it leads, with no such loop and no call inside. What a loop does
follows from the template arguments of its function: rows, units of 16 columns, outputs side by side."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OBJDUMP = "aarch64-linux-gnu-objdump"
MOST = 1.15
JUMP = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z)$")
BF16, SINGLE = "bfdot", "fmla"
BYTES = {"neon": "smull", "dotprod": "sdot", "i8mm": "usdot"}
EACH = {"bfdot": 8, "fmla": 4, "smull": 8, "sdot": 16, "usdot": 16}
"""Multiply-adds of an instruction."""


@dataclass(frozen=True)
class Kernel:
    """Loops of functions whose names match; `useful` says of a match how many multiply-adds a step of a loop has, of
    which it may have several, and how many of the instructions `by` are not of its sums."""

    name: str
    pattern: re.Pattern[str]
    by: str
    useful: Callable[[re.Match[str]], int]


@dataclass(frozen=True)
class Loop:
    """An inner loop: where it is, and its instructions by name."""

    function: str
    at: int
    counts: Counter[str]


def functions(library: Path) -> Iterator[tuple[str, list[tuple[int, str, str]]]]:
    """Names, and instructions (address, name, operands)."""
    listing = subprocess.run(
        [OBJDUMP, "-dC", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    name, lines = "", []
    for line in listing.splitlines():
        if found := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            if lines:
                yield name, lines
            name, lines = found[1], []
        elif found := re.match(r"^ *([0-9a-f]+):\t(\S+)(?:\t(.*))?$", line):
            lines.append((int(found[1], 16), found[2], found[3] or ""))
    if lines:
        yield name, lines


def inner_loops(name: str, lines: list[tuple[int, str, str]]) -> Iterator[Loop]:
    places = {at: i for i, (at, _, _) in enumerate(lines)}
    spans = []
    for i, (at, what, operands) in enumerate(lines):
        target = re.search(r"\b([0-9a-f]+) <", operands) if JUMP.match(what) else None
        if target and int(target[1], 16) <= at and int(target[1], 16) in places:
            spans.append((places[int(target[1], 16)], i))
    for first, last in spans:
        inside = any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
        body = lines[first : last + 1]
        if not inside and not any(what in ("bl", "blr") for _, what, _ in body):
            yield Loop(name, lines[first][0], Counter(_kind(what, operands) for _, what, operands in body))


def _kind(what: str, operands: str) -> str:
    """The instruction; only products of four floats are "fmla", and both halves of a product of bytes "smull"."""
    if what in ("fmla", "fmls"):
        return "fmla" if ".4s" in operands else what
    return (
        {"smull2": "smull", "smlal": "smull", "smlal2": "smull"}.get(what, what) if "b" in operands else what
    )


def check(library: Path, kernels: list[Kernel]) -> list[str]:
    """A line for each kernel: its loops, and the most instructions for each that is needed. Raises AssertionError where
    one has no loop, or too many instructions."""
    loops = [loop for name, lines in functions(library) for loop in inner_loops(name, lines)]
    said = []
    for kernel in kernels:
        ratios = []
        for loop in loops:
            match = kernel.pattern.search(loop.function)
            count = loop.counts[kernel.by]
            if match and count:
                needed = kernel.useful(match) / EACH[kernel.by]
                steps = max(1, int(count // needed))
                ratios.append((count / (needed * steps), loop))
        assert ratios, (
            f"{kernel.name}: no inner loop with {kernel.by} in a function like {kernel.pattern.pattern}"
        )
        worst, loop = max(ratios, key=lambda x: x[0])
        assert worst <= MOST, (
            f"{kernel.name}: {worst:.3f} times the {kernel.by} that are needed, in {loop.function} at {loop.at:x}"
        )
        said.append(
            f"{kernel.name}: {len(ratios)} loops, at most {worst:.3f} {kernel.by} for each that is needed"
        )
    return said
