"""Multiply-add instructions for each that the useful multiply-adds of a product need: QEMU says which code runs how
often, the disassembly what it holds. The inner loops that do most of the work are named.

    python -m tests.native.arm.loops FOLDER [--level LEVEL ...]

where FOLDER is that of `tests.native.arm.run --keep`. A product must have at most `MOST` times the instructions that it
needs, and have inner loops that hold them."""

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.native import build, levels
from tests.native.arm.files import CaseFile
from tests.native.arm.products import matrices, write
from tests.native.arm.run import EMULATOR, PROCESSORS, ROOT_OF_TARGET

OBJDUMP = "aarch64-linux-gnu-objdump"
MOST, SHARE = 1.15, 0.9
EACH = {"fmla": 4, "bfdot": 8, "smull": 8, "sdot": 16, "usdot": 16}
"""Multiply-adds of an instruction, of vectors; both halves of a product of bytes are "smull"."""
BYTES = {"neon": "smull", "dotprod": "sdot", "i8mm": "usdot"}
"""What multiplies bytes at a level."""
ROWS, OUTPUTS, INPUTS = (1, 4, 48), 64, 1024
PAGE = 4096
ENDS = re.compile(r"^(b|bl|blr|br|ret|b\.\w+|cbn?z|tbn?z|svc|udf)$")


@dataclass(frozen=True)
class Line:
    """An instruction: its address in the library, its name, the function that it is of, and where it jumps to."""

    at: int
    name: str
    function: str
    target: int = -1


def disassembled(library: Path, objdump: str = OBJDUMP) -> dict[int, Line]:
    """By address."""
    listing = subprocess.run(
        [objdump, "-dC", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    lines, function = {}, ""
    for line in listing.splitlines():
        if found := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            function = found[1]
        elif found := re.match(r"^ *([0-9a-f]+):\t(\S+)(?:\t(.*))?$", line):
            at = int(found[1], 16)
            to = re.search(r"\b([0-9a-f]+) <", found[3] or "")
            lines[at] = Line(at, kind(found[2], found[3] or ""), function, int(to[1], 16) if to else -1)
    return lines


def kind(name: str, operands: str) -> str:
    """The instruction; "fmla" and "smull" are those of whole vectors."""
    if name in ("fmla", "fmls"):
        return "fmla" if ".4s" in operands else f"{name} of one"
    if name in ("smull", "smull2"):
        return "smull" if ".8h" in operands else f"{name} of one"
    return name


def executed(log: Iterator[str], base: int, lines: dict[int, Line]) -> Counter[tuple[int, int]]:
    """How often each piece of code ran, from its first instruction to behind its last, as QEMU translates them."""
    pairs: Counter[tuple[int, int]] = Counter()
    before = -1
    for text in log:
        if found := re.search(r"\[[0-9a-f]+/0*([0-9a-f]+)/", text):
            at = int(found[1], 16) - base
            pairs[before, at] += before in lines
            before = at
    pairs[before, -1] += before in lines
    runs: Counter[tuple[int, int]] = Counter()
    for (at, following), times in pairs.items():
        if times:
            runs[at, behind(at, following, lines)] += times
    return runs


def behind(at: int, following: int, lines: dict[int, Line]) -> int:
    """Pieces end with a jump or with a page, or earlier, where they are long: then the next one begins there, and is
    not where the jump leads."""
    begin, last = at, at // PAGE * PAGE + PAGE
    while at < last and at in lines:
        at += 4
        if ENDS.match(lines[at - 4].name):
            break
    if begin < following < at and lines[at - 4].target != following:
        return following
    return at


def counted(runs: Counter[tuple[int, int]], lines: dict[int, Line], by: str) -> Counter[int]:
    """How many instructions `by` ran in the pieces of code that begin at an address."""
    counts: Counter[int] = Counter()
    for (begin, end), times in runs.items():
        counts[begin] += times * sum(lines[at].name == by for at in range(begin, end, 4))
    return counts


def report(
    what: str, by: str, useful: int, counts: Counter[int], runs: Counter[int], lines: dict[int, Line]
) -> list[str]:
    """Says what a product has of what it needs, and names its loops: code that ran more than once and makes up `SHARE`
    of all. Raises AssertionError where there is none, or too much of it."""
    total = sum(counts.values())
    needed = useful / EACH[by]
    loops: list[int] = []
    for at, count in counts.most_common():
        if sum(counts[x] for x in loops) >= SHARE * total:
            break
        if count and runs[at] > 1:
            loops.append(at)
    assert total, f"{what}: no {by} ran"
    assert sum(counts[x] for x in loops) >= SHARE * total, f"{what}: no inner loops have most of the {by}"
    assert total >= needed, f"{what}: {total} {by} are fewer than the {needed:.0f} of its multiply-adds"
    ratio = total / needed
    assert ratio <= MOST, f"{what}: {ratio:.3f} times the {by} that are needed, in {names(loops, lines)}"
    return [f"{what}: {ratio:.3f} {by} for each that is needed, in {names(loops, lines)}"]


def names(loops: Sequence[int], lines: dict[int, Line]) -> str:
    return "; ".join(f"{short(lines[at].function)} at {at:x}" for at in loops[:6])


def short(function: str) -> str:
    """Without namespaces and arguments."""
    function = re.sub(r"\(anonymous namespace\)::", "", function)
    return function.partition("(")[0][:100]


def measure(to: Path, level: str, name: str, x: torch.Tensor, draw: torch.Generator) -> list[str]:
    """What a product of x has, by a matrix of this name."""
    named = [row for row in matrices(x.dtype, draw, OUTPUTS, INPUTS) if row[0] == name]
    assert len(named) == 1, f"there is no matrix {name}"
    cases, library = to / "one.bin", to / "lib" / build.file_name(level)
    with CaseFile(cases) as file:
        write(file, x, named)
    of_pairs = x.dtype == torch.bfloat16 and level == "i8mm"
    by = BYTES[level] if named[0][3] else "bfdot" if of_pairs and name != "float32" else "fmla"
    log = to / "log"
    command = [
        EMULATOR,
        "-L",
        str(ROOT_OF_TARGET),
        "-cpu",
        PROCESSORS[level],
        "-d",
        "exec,nochain",
        "-D",
        str(log),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, to / "driver", library, cases], capture_output=True, text=True, check=True, env=environment
    )
    base = re.search(r"library at 0x([0-9a-f]+)", done.stderr)
    assert base, done.stderr
    lines = disassembled(library)
    with log.open() as texts:
        runs = executed(texts, int(base[1], 16), lines)
    log.unlink()
    times: Counter[int] = Counter()
    for (begin, _), count in runs.items():
        times[begin] += count
    what = f"{level}, {len(x)} rows of {str(x.dtype)[6:]} by {name}"
    return report(what, by, len(x) * OUTPUTS * INPUTS, counted(runs, lines, by), times, lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.arm.loops")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", action="append")
    given = parser.parse_args()
    draw, wrong = torch.Generator().manual_seed(0), 0
    for level in given.level or levels.known("aarch64")[:-1]:
        for rows in ROWS:
            x = torch.randn(rows, INPUTS, generator=draw)
            products = [
                (x, name) for name in ("float32", "bf16", "8 bits, 32, symmetric", "4 bits, 32, symmetric")
            ]
            products += [(x.bfloat16(), name) for name in ("bf16", "nf4", "q4_K", "q6_K")]
            for given_x, name in products:
                try:
                    print(*measure(given.folder, level, name, given_x, draw), flush=True)
                except AssertionError as reason:
                    wrong += 1
                    print(f"FAILED {reason}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
