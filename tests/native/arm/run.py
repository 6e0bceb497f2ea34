"""The levels of aarch64, cross-compiled, repeat calls from files in QEMU, whose float64 results were written here, and
decode stories260K by the steps that this machine's kernels have made: `make test-arm`.

    python -m tests.native.arm.run [--keep FOLDER] [--level LEVEL ...] [--tests TESTS ...]

CROSS_CXX may name the compiler with a prefix (ccache).

Each level runs on a processor that has no more than the level needs."""

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
"""Modules beside this one that write cases."""


def missing() -> str:
    """Returns what these tests need and do not find; "" if nothing is missing."""
    for program in (COMPILER, EMULATOR):
        if not shutil.which(program):
            return f"{program} is not in PATH (Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user)"
    if not (ROOT_OF_TARGET / "lib/libgomp.so.1").exists():
        return f"{ROOT_OF_TARGET}/lib has no libgomp.so.1 (Debian, Ubuntu: apt install libgomp1-arm64-cross)"
    return ""


def record(folder: Path, tests: list[str]) -> list[Path]:
    """Returns the files of cases, of which missing ones are made; with `tests`, the one that these tests make."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    part, files = folder / "part.bin", []
    of_tests = ["pytest", "-q", "-s", "-p", "tests.native.arm.record", "-p", "no:cacheprovider", "--cases"]
    makers = {name: [f"tests.native.arm.{name}", str(part)] for name in CASES}
    if tests:
        makers = {"tests": [*of_tests, str(part), *tests]}
    for name, maker in makers.items():
        files.append(folder / f"{name}.bin")
        if not files[-1].exists():
            subprocess.run([sys.executable, "-m", *maker], cwd=ROOT, env=environment, check=True)
            part.replace(files[-1])
    return files


def emulate(level: str, *command: Path) -> tuple[int, str]:
    """Returns a program's exit code and output, on a processor of a level."""
    emulator = [EMULATOR, "-L", str(ROOT_OF_TARGET), "-cpu", PROCESSORS[level]]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    result = subprocess.run([*emulator, *command], capture_output=True, text=True, env=environment)
    return result.returncode, result.stderr + result.stdout


def operations(level: str, folder: Path) -> Path:
    """Builds the program that compares a level's operations with plain ones."""
    program = folder / f"operations_{level}"
    macros = {"LEVEL": level, "VEC": f'"vec_{level}.h"'}
    flags = [*levels.LEVELS[level], *(f"-DHEADWAY_{name}={value}" for name, value in macros.items())]
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
    """Returns what is wrong with a library's instructions: some are not of its level, or all are of a lower one."""
    instructions, lower = forms(library), levels.runnable(levels.NEEDS[level], tiles=False)[1:2]
    if lacking := foreign(instructions, level):
        return f"{len(lacking)} instructions are not of the level, the first of them {lacking[0]}"
    if lower and lower != ["portable"] and not foreign(instructions, lower[0]):
        return f"it could be of level {lower[0]}"
    return ""


def published() -> str:
    """Returns the text that llama2.c publishes for greedy decoding."""
    text = (data_path("weights/stories260K") / "stories260K.md").read_text()
    match = re.search(r"-t 0\.0\n(.*?)\n```", text, re.DOTALL)
    assert match is not None
    return match[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.arm.run")
    parser.add_argument("--keep", type=Path, help="a folder for libraries and cases, which are used again")
    parser.add_argument("--level", action="append", help="only this level; can be repeated")
    parser.add_argument("--tests", action="append", help="record these tests instead of the usual cases")
    options = parser.parse_args()
    if why := missing():
        print(f"skipped: {why}")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        compiler, os.environ["CXX"] = os.environ.get("CXX", ""), os.environ.get("CROSS_CXX", COMPILER)
        chosen = options.level or levels.known("aarch64")
        build.build(folder / "lib", chosen, machine="aarch64", force=False)
        os.environ["CXX"] = compiler
        driver = folder / "driver"
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
        files, failed = record(folder, options.tests or []), 0
        for level in chosen:
            library = folder / "lib" / build.file_name(level)
            if why := beyond(level, library):
                failed += 1
                print(f"{level}: {why}")
            programs = {Path("operations"): (operations(level, folder),)}
            programs |= {cases: (driver, library, cases) for cases in files}
            for cases, program in programs.items():
                begin = time.monotonic()
                code, output = emulate(level, *program)
                if cases.stem == "decode" and published() not in output:
                    code, output = code or 1, output + "this is not the published text\n"
                lines = output.strip().splitlines()
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
