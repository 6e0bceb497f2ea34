"""Compiles the kernels of `csrc` into one shared library per CPU level. Imports the standard library only.

    python -m headway.native.build [--level LEVEL ...] [--out FOLDER] [--force] [--sanitize] [--machine MACHINE]

Another machine's levels are compiled by a cross compiler: CXX=aarch64-linux-gnu-g++ and --machine aarch64.

The installation calls the same functions, for the level of the installing machine; HEADWAY_LEVELS=all builds all
levels, as wheels for other machines do, HEADWAY_LEVELS=avx2,portable those two. HEADWAY_BUILD says what a failure
means: `auto` (build, and continue without kernels if that fails), `require` (fail), `off` (do not build). On the
command line, all levels and `require` are the default.
"""

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headway.errors import BuildError, check_known, did_you_mean
from headway.native import levels
from headway.native.levels import LEVELS, OWN, STANDS_ON

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
LIBRARIES = HERE / "lib"
COMMAND = "python -m headway.native.build"
MODES = ("auto", "require", "off")
OF_THIS_MACHINE, ALL = "native", "all"
COMPILERS = ("g++", "clang++", "c++")
JOBS = 2

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
# Apple's clang enables OpenMP by its internal option, and the runtime is torch's: the loader opens that first, and
# undefined symbols are resolved then. On Windows torch ships LLVM's and Intel's under this name. Neither was run yet.
OPENMP = {"darwin": ("-fPIC", "-Xclang", "-fopenmp"), "win32": ("-fopenmp=libiomp5",)}.get(
    sys.platform, ("-fPIC", "-fopenmp")
)
LINKED = {"darwin": ("-undefined", "dynamic_lookup")}.get(sys.platform, ())

FLAGS = (
    "-O3", "-std=c++17", *OPENMP, "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
SANITIZE = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
STAMP = re.compile(rb"headway-source-hash:([0-9a-f]{16})\0")


def file_name(level: str) -> str:
    """Returns the file name of a level's library."""
    return f"libheadway_{level}{SUFFIX}"


def source_hash(level: str, sources: Path = SOURCES) -> str:
    """Returns 16 hexadecimal digits that change with any source and with the compiler flags of the level."""
    digest = hashlib.sha256(" ".join((level, *FLAGS, *LEVELS[level])).encode())
    for path in sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def built_hash(library: Path) -> str | None:
    """Returns the source hash that a library file was built from, read without loading the library; None if the file is
    missing or has no hash."""
    try:
        match = STAMP.search(library.read_bytes())
    except OSError:
        return None
    return match.group(1).decode() if match else None


def mode(environment: Mapping[str, str] = os.environ, default: str = "auto") -> str:
    """Returns the mode that HEADWAY_BUILD names: "auto", "require" or "off". Raises BuildError for another."""
    choice = environment.get("HEADWAY_BUILD") or default
    if choice not in MODES:
        raise BuildError(
            f"HEADWAY_BUILD must be one of {', '.join(MODES)}, got {choice!r}{did_you_mean(choice, MODES)}"
        )
    return choice


def asked_levels(
    environment: Mapping[str, str] = os.environ, default: str = OF_THIS_MACHINE, machine: str | None = None
) -> tuple[list[str], bool]:
    """Returns the levels that HEADWAY_LEVELS names, and whether only the best that the compiler supports is to be
    built. "native" names those that this machine runs; "all" those of `machine` (default: this one); else names with
    commas."""
    names = environment.get("HEADWAY_LEVELS") or default
    if names == OF_THIS_MACHINE:
        return levels.of_this_machine(), True
    return [*levels.known(machine)] if names == ALL else names.split(","), False


def compiler() -> list[str]:
    """Returns the command of the C++ compiler: CXX if set, else the first of g++, clang++ and c++ in PATH.

    Raises BuildError if there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    if chosen:
        raise BuildError(f"no C++ compiler: CXX={os.environ['CXX']} names no program; correct or unset it")
    raise BuildError(
        f"no C++ compiler: none of {', '.join(COMPILERS)} is in PATH; install one (Debian, Ubuntu: "
        "apt install g++) or name one in CXX"
    )


def build(
    out: Path = LIBRARIES,
    only: Iterable[str] = (),
    *,
    best: bool = False,
    sources: Path = SOURCES,
    machine: str | None = None,
    sanitize: bool = False,
    force: bool = True,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Compiles the levels `only` (default: all of the architecture `machine`, default: this one) into the folder `out`;
    with `best`, only the best of them that the compiler supports. Returns the library files, best level first.

    Each file is replaced atomically, so that a process sees the old library or the new one. `force=False` keeps
    libraries that were built from these sources and flags; sanitized ones are always built. Levels that the compiler is
    too old for are skipped with a message. Raises BuildError with the compiler's last words if the sources do not
    compile, or if the compiler does not support a level that `only` names without `best`."""
    names, known = tuple(only), levels.known(machine)
    for level in names:
        check_known(level, known, f"{machine or platform.machine()} has no level", error=BuildError)
    built: list[str] = []
    stale: list[str] = []
    for level in (x for x in known if x in names or not names):
        must = level == "portable" or (level in names and not best)
        if force or sanitize or built_hash(out / file_name(level)) != source_hash(level, sources):
            if not _able(compiler(), level, must, say):
                continue
            stale.append(level)
        built.append(level)
        if best:
            break
    if stale:
        command, extra_flags = compiler(), SANITIZE if sanitize else ()
        say(f"{shlex.join(command)}: {', '.join(stale)}, {JOBS} at a time")
        _compile({x: [*command, *_flags(x, sources), *extra_flags] for x in known}, sources, out, stale)
    return [out / file_name(level) for level in built]


def _able(command: list[str], level: str, must: bool, say: Callable[[str], None]) -> bool:
    """Returns whether the compiler supports the instruction sets of a level; raises BuildError instead of False if it
    `must`."""
    try:
        _run([*command, *FLAGS, *LEVELS[level], "-x", "c++", "-c", "-o", os.devnull, "-"], "int x;")
    except BuildError as error:
        if must:
            raise
        say(f"level {level} is left out, {command[0]} is too old for it: {str(error).splitlines()[-1]}")
        return False
    return True


def _compile(commands: dict[str, list[str]], sources: Path, out: Path, names: Iterable[str]) -> None:
    """Compiles the libraries of the levels `names`; `commands` has the compiler command of every level. The source hash
    in the commands was computed before any source is read: an edit during the build makes the library stale, never
    wrongly fresh."""
    out.mkdir(parents=True, exist_ok=True)
    units = sorted(sources.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="headway-") as scratch, ThreadPoolExecutor(JOBS) as pool:
        exports = Path(scratch, "exports")
        exports.write_text("{ global: headway_*; local: *; };\n")
        hide = [f"-Wl,--version-script={exports}"] if sys.platform == "linux" else LINKED
        fresh = {x: out / f".{file_name(x)}.{os.getpid()}" for x in names}
        parts = {x: [(x if unit.name in OWN else STANDS_ON.get(x, x), unit) for unit in units] for x in fresh}
        objects = {
            (x, unit): str(Path(scratch, f"{x}-{unit.stem}.o")) for part in parts.values() for x, unit in part
        }
        try:
            for job in [
                pool.submit(_run, [*commands[x], "-c", str(unit), "-o", target])
                for (x, unit), target in objects.items()
            ]:
                job.result()
            for x, path in fresh.items():
                _run([*commands[x], "-shared", *hide, *(objects[part] for part in parts[x]), "-o", str(path)])
            for x, path in fresh.items():
                path.replace(out / file_name(x))
        finally:
            pool.shutdown(cancel_futures=True)
            for path in fresh.values():
                path.unlink(missing_ok=True)


def _flags(level: str, sources: Path) -> list[str]:
    stamp = f'"{source_hash(level, sources)}"'
    names = {"LEVEL": level, "VEC": f'"vec_{level}.h"', "SOURCE_HASH": stamp}
    return [*FLAGS, *LEVELS[level], *(f"-DHEADWAY_{name}={value}" for name, value in names.items())]


def _run(command: list[str], text: str = "") -> None:
    """Runs a compiler with `text` as its input. Raises BuildError with its last words if it fails."""
    process = subprocess.run(command, input=text, capture_output=True, text=True)
    if process.returncode:
        last = "\n".join(process.stderr.strip().splitlines()[-12:])
        raise BuildError(
            f"the native kernels do not compile; the command\n{shlex.join(command)}\n"
            f"failed with exit code {process.returncode}; its last lines:\n{last}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns exit code 1 if a required library could not be built."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Compile headway's native kernels.")
    parser.add_argument("--level", action="append", default=[], help="only this level; can be repeated")
    parser.add_argument("--out", type=Path, help="folder of the libraries [default: beside the package]")
    parser.add_argument("--force", action="store_true", help="also those that are up to date")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined sanitizers")
    parser.add_argument(
        "--machine", choices=sorted(levels.MACHINES), help="whose levels [default: this one's]"
    )
    args = parser.parse_args(arguments)
    out = args.out or (LIBRARIES / "sanitized" if args.sanitize else LIBRARIES)
    build_mode = "require"
    try:
        build_mode = mode(default=build_mode)
        if build_mode == "off":
            _say("HEADWAY_BUILD=off: nothing built")
        else:
            named = args.level or args.machine
            only, best = (args.level, False) if named else asked_levels(default=ALL)
            how_built = {"machine": args.machine, "sanitize": args.sanitize, "force": args.force}
            paths = build(out, only, best=best, **how_built, say=_say)
            print(*paths, sep="\n")
            if args.sanitize:
                asan = shlex.join([*compiler(), "-print-file-name=libasan.so"])
                _say(
                    f"LD_PRELOAD=$({asan}) ASAN_OPTIONS=detect_leaks=0 HEADWAY_NATIVE_DIR={out} runs with them"
                )
    except BuildError as error:
        _say(f"headway: {'error' if build_mode == 'require' else 'going on without native kernels'}: {error}")
        return 1 if build_mode == "require" else 0
    return 0


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
