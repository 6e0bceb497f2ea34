"""Multiply-add instructions for each one that a product needs: QEMU reports which code runs how often, and the
disassembly shows its instructions. The inner loops that do most of the work are named.

    python -m tests.native.arm.loops FOLDER [--level LEVEL ...]

FOLDER is that of `tests.native.arm.run --keep`. A product may run at most `MOST` times the instructions that it needs,
and must have inner loops that run most of them."""

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
"""Multiply-adds of each vector instruction; both halves of a product of bytes are "smull"."""
BYTES = {"neon": "smull", "dotprod": "sdot", "i8mm": "usdot"}
"""The instruction that multiplies bytes at each level."""
ROWS, OUTPUTS, INPUTS = (1, 4, 48), 64, 1024
PAGE = 4096
ENDS = re.compile(r"^(b|bl|blr|br|ret|b\.\w+|cbn?z|tbn?z|svc|udf)$")


@dataclass(frozen=True)
class Line:
    """An instruction: its address in the library, its name, its function, and the address that it jumps to."""

    at: int
    name: str
    function: str
    target: int = -1


def disassembled(library: Path, objdump: str = OBJDUMP) -> dict[int, Line]:
    """Returns the instructions of a library by their address."""
    listing = subprocess.run(
        [objdump, "-dC", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    lines, function = {}, ""
    for line in listing.splitlines():
        if match := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            function = match[1]
        elif match := re.match(r"^ *([0-9a-f]+):\t(\S+)(?:\t(.*))?$", line):
            address = int(match[1], 16)
            target = re.search(r"\b([0-9a-f]+) <", match[3] or "")
            lines[address] = Line(
                address, kind(match[2], match[3] or ""), function, int(target[1], 16) if target else -1
            )
    return lines


def kind(name: str, operands: str) -> str:
    """Returns the name of an instruction; "fmla" and "smull" only stand for those of whole vectors."""
    if name in ("fmla", "fmls"):
        return "fmla" if ".4s" in operands else f"{name} of one"
    if name in ("smull", "smull2"):
        return "smull" if ".8h" in operands else f"{name} of one"
    return name


def executed(log: Iterator[str], base: int, lines: dict[int, Line]) -> Counter[tuple[int, int]]:
    """Returns how often each piece of code (begin, end) ran, in the pieces that QEMU translates."""
    pairs: Counter[tuple[int, int]] = Counter()
    previous = -1
    for line in log:
        if match := re.search(r"\[[0-9a-f]+/0*([0-9a-f]+)/", line):
            address = int(match[1], 16) - base
            pairs[previous, address] += previous in lines
            previous = address
    pairs[previous, -1] += previous in lines
    runs: Counter[tuple[int, int]] = Counter()
    for (address, following), times in pairs.items():
        if times:
            runs[address, behind(address, following, lines)] += times
    return runs


def behind(address: int, following: int, lines: dict[int, Line]) -> int:
    """Returns the end of a piece of code. It ends with a jump or with a page, or earlier if it is long: then the next
    piece begins there, and not where the jump leads."""
    begin, last = address, address // PAGE * PAGE + PAGE
    while address < last and address in lines:
        address += 4
        if ENDS.match(lines[address - 4].name):
            break
    if begin < following < address and lines[address - 4].target != following:
        return following
    return address


def counted(runs: Counter[tuple[int, int]], lines: dict[int, Line], instruction: str) -> Counter[int]:
    """Returns how often `instruction` ran in the pieces of code that begin at each address."""
    counts: Counter[int] = Counter()
    for (begin, end), times in runs.items():
        counts[begin] += times * sum(lines[address].name == instruction for address in range(begin, end, 4))
    return counts


def report(
    product: str,
    instruction: str,
    useful: int,
    counts: Counter[int],
    runs: Counter[int],
    lines: dict[int, Line],
) -> list[str]:
    """Returns how many times the needed instructions a product ran, and its loops: code that ran more than once and
    makes up `SHARE` of all. Raises AssertionError if there are no such loops, or too many instructions."""
    total = sum(counts.values())
    needed = useful / EACH[instruction]
    loops: list[int] = []
    for address, count in counts.most_common():
        if sum(counts[x] for x in loops) >= SHARE * total:
            break
        if count and runs[address] > 1:
            loops.append(address)
    assert total, f"{product}: no {instruction} ran"
    assert sum(counts[x] for x in loops) >= SHARE * total, (
        f"{product}: no inner loops have most of the {instruction}"
    )
    assert total >= needed, (
        f"{product}: {total} {instruction} are fewer than the {needed:.0f} of its multiply-adds"
    )
    ratio = total / needed
    assert ratio <= MOST, (
        f"{product}: {ratio:.3f} times the {instruction} that are needed, in {names(loops, lines)}"
    )
    return [f"{product}: {ratio:.3f} {instruction} for each that is needed, in {names(loops, lines)}"]


def names(loops: Sequence[int], lines: dict[int, Line]) -> str:
    return "; ".join(f"{short(lines[address].function)} at {address:x}" for address in loops[:6])


def short(function: str) -> str:
    """Returns the name of a function without namespaces and arguments."""
    function = re.sub(r"\(anonymous namespace\)::", "", function)
    return function.partition("(")[0][:100]


def measure(folder: Path, level: str, name: str, x: torch.Tensor, generator: torch.Generator) -> list[str]:
    """Measures the product of x with the matrix of this name, and returns its report."""
    chosen = [row for row in matrices(x.dtype, generator, OUTPUTS, INPUTS) if row[0] == name]
    assert len(chosen) == 1, f"there is no matrix {name}"
    cases, library = folder / "one.bin", folder / "lib" / build.file_name(level)
    with CaseFile(cases) as file:
        write(file, x, chosen)
    of_pairs = x.dtype == torch.bfloat16 and level == "i8mm"
    instruction = BYTES[level] if chosen[0][3] else "bfdot" if of_pairs and name != "float32" else "fmla"
    log = folder / "log"
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
    result = subprocess.run(
        [*command, folder / "driver", library, cases],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    base = re.search(r"library at 0x([0-9a-f]+)", result.stderr)
    assert base, result.stderr
    lines = disassembled(library)
    with log.open() as log_lines:
        runs = executed(log_lines, int(base[1], 16), lines)
    log.unlink()
    times: Counter[int] = Counter()
    for (begin, _), count in runs.items():
        times[begin] += count
    product = f"{level}, {len(x)} rows of {str(x.dtype)[6:]} by {name}"
    return report(
        product, instruction, len(x) * OUTPUTS * INPUTS, counted(runs, lines, instruction), times, lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.arm.loops")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", action="append")
    options = parser.parse_args()
    generator, failures = torch.Generator().manual_seed(0), 0
    for level in options.level or levels.known("aarch64")[:-1]:
        for rows in ROWS:
            x = torch.randn(rows, INPUTS, generator=generator)
            products = [
                (x, name) for name in ("float32", "bf16", "8 bits, 32, symmetric", "4 bits, 32, symmetric")
            ]
            products += [(x.bfloat16(), name) for name in ("bf16", "nf4", "q4_K", "q6_K")]
            for inputs, name in products:
                try:
                    print(*measure(options.folder, level, name, inputs, generator), flush=True)
                except AssertionError as reason:
                    failures += 1
                    print(f"FAILED {reason}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
