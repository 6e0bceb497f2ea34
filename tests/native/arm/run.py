"""The levels of aarch64, cross-compiled, make calls from files in QEMU, whose float64 results were written here, and
decode stories260K by the steps that this machine's kernels have made: `make test-arm`.

    python -m tests.native.arm.run [--keep FOLDER] [--level LEVEL ...] [--tests TESTS ...]

CROSS_CXX may name the compiler with what stands before it (ccache).

Each level runs on a processor that has no more than it asks for."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headway.native import build, levels
from tests.data import data_path
from tests.native.arm.foreign import foreign, forms

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COMPILER, EMULATOR, ROOT_OF_TARGET = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
PROCESSORS = {"portable": "cortex-a57", "neon": "cortex-a57", "dotprod": "neoverse-n1", "i8mm": "max"}
CASES = ("products", "attention", "rows", "decode")
"""Modules beside this one, which write cases."""


def missing() -> str:
    """What is not there that this needs; "" if all is."""
    for program in (COMPILER, EMULATOR):
        if not shutil.which(program):
            return f"{program} is not in PATH (Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user)"
    if not (ROOT_OF_TARGET / "lib/libgomp.so.1").exists():
        return f"{ROOT_OF_TARGET}/lib has no libgomp.so.1 (Debian, Ubuntu: apt install libgomp1-arm64-cross)"
    return ""


def record(to: Path, tests: list[str]) -> list[Path]:
    """The files of cases, unless they are there; of `tests`, where given, those that they make."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    part, files = to / "part.bin", []
    of_tests = ["pytest", "-q", "-s", "-p", "tests.native.arm.record", "-p", "no:cacheprovider", "--cases"]
    makers = {name: [f"tests.native.arm.{name}", str(part)] for name in CASES}
    if tests:
        makers = {"tests": [*of_tests, str(part), *tests]}
    for name, maker in makers.items():
        files.append(to / f"{name}.bin")
        if not files[-1].exists():
            subprocess.run([sys.executable, "-m", *maker], cwd=ROOT, env=environment, check=True)
            part.replace(files[-1])
    return files


def emulate(level: str, *command: Path) -> tuple[int, str]:
    """A program's exit code and what it has printed, on a processor of a level."""
    emulator = [EMULATOR, "-L", str(ROOT_OF_TARGET), "-cpu", PROCESSORS[level]]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([*emulator, *command], capture_output=True, text=True, env=environment)
    return done.returncode, done.stderr + done.stdout


def operations(level: str, to: Path) -> Path:
    """The program that compares a level's operations with plain ones."""
    program = to / f"operations_{level}"
    names = {"LEVEL": level, "VEC": f'"vec_{level}.h"'}
    flags = [*levels.LEVELS[level], *(f"-DHEADWAY_{name}={value}" for name, value in names.items())]
    command = [
        COMPILER,
        "-O1",
        "-std=c++17",
        "-Wno-psabi",
        *flags,
        f"-I{build.SOURCES}",
        str(HERE / "operations.cpp"),
    ]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def beyond(level: str, library: Path) -> str:
    """What is wrong with the instructions of a level's library: some that it lacks, or none that the next one lacks."""
    instructions, lower = forms(library), levels.runnable(levels.NEEDS[level], tiles=False)[1:2]
    if wrong := foreign(instructions, level):
        return f"{len(wrong)} instructions are not of the level, the first of them {wrong[0]}"
    if lower and lower != ["portable"] and not foreign(instructions, lower[0]):
        return f"it could be of level {lower[0]}"
    return ""


def published() -> str:
    text = (data_path("weights/stories260K") / "stories260K.md").read_text()
    found = re.search(r"-t 0\.0\n(.*?)\n```", text, re.DOTALL)
    assert found is not None
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.arm.run")
    parser.add_argument("--keep", type=Path, help="a folder for libraries and cases, which are used again")
    parser.add_argument("--level", action="append", help="only this level; can be repeated")
    parser.add_argument("--tests", action="append", help="record these tests instead of the usual cases")
    given = parser.parse_args()
    if why := missing():
        print(f"skipped: {why}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        to = given.keep or Path(scratch)
        to.mkdir(parents=True, exist_ok=True)
        before, os.environ["CXX"] = os.environ.get("CXX", ""), os.environ.get("CROSS_CXX", COMPILER)
        wanted = given.level or levels.known("aarch64")
        build.build(to / "lib", wanted, machine="aarch64", force=False)
        os.environ["CXX"] = before
        driver = to / "driver"
        command = [
            COMPILER,
            "-O2",
            "-std=c++17",
            "-Wall",
            str(HERE / "driver.cpp"),
            "-o",
            str(driver),
            "-ldl",
        ]
        subprocess.run(command, check=True)
        files, failed = record(to, given.tests or []), 0
        for level in wanted:
            library = to / "lib" / build.file_name(level)
            if why := beyond(level, library):
                failed += 1
                print(f"{level}: {why}")
            programs = {Path("operations"): (operations(level, to),)}
            programs |= {cases: (driver, library, cases) for cases in files}
            for cases, program in programs.items():
                begin = time.monotonic()
                code, said = emulate(level, *program)
                if cases.stem == "decode" and published() not in said:
                    code, said = code or 1, said + "this is not the published text\n"
                lines = said.strip().splitlines()
                print(
                    f"{level} on {PROCESSORS[level]}, {cases.stem}, {time.monotonic() - begin:.0f} s: {lines[-1]}"
                )
                if code:
                    failed += 1
                    print(
                        f"exit code {code}",
                        *[x for x in lines if "FAILED" in x or "driver:" in x][:40],
                        sep="\n",
                    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
