"""Compiles the kernels of one CPU level unit by unit: to record which code runs, or with a fault.

Both are compiled with `SPEED`, which compiles faster than the release's flags; the tests pass with it too. A library
with a fault has the stamp of the sources without it, so that the loader accepts it.
"""

import functools
import re
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CSRC = "src/headway/native/csrc"
SPEED = "-O1"
NOTING = """
#include <stddef.h>
#include <stdint.h>
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
static unsigned char seen[1 << 24];
__attribute__((visibility("default"))) const size_t headway_seen_size = sizeof seen;
__attribute__((visibility("default"))) unsigned char *headway_seen(void) { return seen; }
void __sanitizer_cov_trace_pc(void) {
  const size_t at = (size_t)((const char *)__builtin_return_address(0) - __ehdr_start);
  if (at < sizeof seen) seen[at] = 1;
}
"""
"""Every block of code calls the hook first; it records the call's offset from the start of the library."""


sys.path.insert(0, str(ROOT / "src"))  # headway is imported later, from this path


class DoesNotCompileError(Exception):
    """Raised with the compiler's output."""


@functools.cache
def level() -> str:
    """Returns the best CPU level of this machine."""
    from headway.native.levels import of_this_machine

    return of_this_machine()[0]


def command(sources: Path) -> list[str]:
    """Returns the compiler and its flags, with the stamp of `sources`."""
    from headway.native import build

    return [*build.compiler(), *build._flags(level(), sources), SPEED]


def library_name() -> str:
    from headway.native import build

    return build.file_name(level())


def call(*words: str) -> str:
    process = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        raise DoesNotCompileError(process.stdout[-2000:])
    return process.stdout


def link(objects: Iterable[Path], out: Path) -> Path:
    call(command(ROOT / CSRC)[0], "-shared", "-fopenmp", *map(str, objects), "-o", str(out))
    return out


def noting(cache: Path) -> Path:
    """Returns a library of the best level that records which blocks run, in a folder with copies of the other levels'
    libraries. It is compiled again only if the sources have changed."""
    from headway.native import build

    out = cache / "noting"
    library = out / library_name()
    if build.built_hash(library) == build.source_hash(level()):
        return library
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in (ROOT / "src/headway/native/lib").glob("*.so"):
        if path.name != library.name:
            shutil.copy2(path, out)
    hook = out / "noting.c"
    hook.write_text(NOTING)
    call("gcc", "-O1", "-fPIC", "-c", str(hook), "-o", str(out / "noting.o"))
    objects = [out / "noting.o"]
    for unit in sorted((ROOT / CSRC).glob("*.cpp")):
        objects.append(out / f"{unit.name}.o")
        flags = ("-g", "-fsanitize-coverage=trace-pc")
        call(*command(ROOT / CSRC), *flags, "-c", str(unit), "-o", str(objects[-1]))
    return link(objects, library)


def lines_of_blocks(library: Path) -> dict[int, set[tuple[str, int]]]:
    """Returns the source lines (file name, number) of each block of a recording library, by address."""
    text = call("objdump", "-d", "--no-show-raw-insn", str(library))
    addresses = re.finditer(r"call\s+\S+ <__sanitizer_cov_trace_pc.*?>\n\s+([0-9a-f]+):", text)
    begins = sorted(int(m.group(1), 16) for m in addresses)
    blocks: dict[int, set[tuple[str, int]]] = {begin: set() for begin in begins}
    address, lines = 0, set[tuple[str, int]]()
    for row in call("objdump", "--dwarf=decodedline", str(library)).splitlines():
        if not (match := re.match(r"(\S+)\s+(\d+|-)\s+0x([0-9a-f]+)", row)):
            continue
        if (next_address := int(match.group(3), 16)) != address:
            _spread(blocks, begins, lines, address, next_address)
            address, lines = next_address, set()
        if match.group(2) != "-":
            lines.add((Path(match.group(1)).name, int(match.group(2))))
    return blocks


def _spread(
    blocks: dict[int, set[tuple[str, int]]],
    begins: list[int],
    lines: set[tuple[str, int]],
    low: int,
    high: int,
) -> None:
    """Adds lines with code at addresses from `low` to `high` to the blocks that contain these addresses."""
    if lines:
        for begin in begins[max(bisect_right(begins, low) - 1, 0) : bisect_right(begins, high - 1)]:
            blocks[begin] |= lines


class Builder:
    """Compiles the kernels of a checkout with one file changed; units that do not include it are compiled once."""

    def __init__(self, tree: Path, scratch: Path) -> None:
        self.libraries = tree / "src/headway/native/lib"
        self.command = command(tree / CSRC)
        self.sources = scratch / "csrc"
        shutil.copytree(tree / CSRC, self.sources)
        self.base = scratch / "base"
        self.base.mkdir()
        for unit in self.units:
            self._compile(unit, self.base)

    @functools.cached_property
    def units(self) -> list[Path]:
        return sorted(self.sources.glob("*.cpp"))

    @functools.cached_property
    def included(self) -> dict[str, set[str]]:
        """The units that include each file."""
        users = defaultdict(set)
        for unit in self.units:
            for word in call(*self.command, "-MM", str(unit)).replace("\\\n", " ").split()[1:]:
                users[Path(word).name].add(unit.name)
        return users

    def _compile(self, unit: Path, out: Path) -> Path:
        target = out / f"{unit.name}.o"
        call(*self.command, "-c", str(unit), "-o", str(target))
        return target

    def build(self, name: str, text: str, out: Path) -> bool:
        """Builds the library in `out` with `text` as csrc/`name`; returns False if the machine code is unchanged."""
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        before = (self.sources / name).read_text()
        (self.sources / name).write_text(text)
        try:
            changed = {
                unit.name: self._compile(unit, out) for unit in self.units if unit.name in self.included[name]
            }
        finally:
            (self.sources / name).write_text(before)
        if all(same(path, self.base / path.name) for path in changed.values()):
            return False
        self._link([changed.get(u.name, self.base / f"{u.name}.o") for u in self.units], out)
        return True

    def _link(self, objects: Sequence[Path], out: Path) -> None:
        for path in self.libraries.glob("*.so"):
            (out / path.name).symlink_to(path)
        (out / library_name()).unlink(missing_ok=True)
        link(objects, out / library_name())


def same(path: Path, other: Path) -> bool:
    return path.read_bytes() == other.read_bytes()
