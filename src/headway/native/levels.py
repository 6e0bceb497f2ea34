"""The levels of processors that kernels are compiled for, and which of them a processor has. Imports the standard
library only."""

import platform
from collections.abc import Set

from headway.processor import cpu_flags, tiles_refused

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)
_VNNI = ("-mavx512vnni", *_AVX512)
_BF16 = ("-mavx512bf16", "-mavx512vbmi2", *_VNNI)
_X86: dict[str, tuple[str, ...]] = {
    "amx": ("-mamx-tile", "-mamx-int8", *_BF16),
    "avx512bf16": _BF16,
    "avx512vnni": _VNNI,
    "avx512": _AVX512,
    "avxvnni": ("-mavxvnni", *_AVX2),
    "avx2": _AVX2,
}
_ARM: dict[str, tuple[str, ...]] = {
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
    "dotprod": ("-march=armv8.2-a+dotprod",),
    "neon": ("-march=armv8-a",),
}
LEVELS = {**_X86, **_ARM, "portable": ()}
"""The levels of each architecture, best first, and the instruction sets that each may use; `csrc/vec_LEVEL.h` has its
use of them. Never -march=native: a library is built where it does not run."""
STANDS_ON = {"amx": "avx512bf16", "avx512vnni": "avx512", "avxvnni": "avx2", "dotprod": "neon"}
OWN = ("linear.cpp", "measure.cpp", "step.cpp")
"""Levels that differ from another in products of bytes alone, and the sources that have such: all others are compiled
once for both."""

_SYSTEM_NAMES = {
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "avxvnni": "avx_vnni",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avx512vbmi2": "avx512_vbmi2",
    "bmi": "bmi1",
    "armv8-a": "asimd",
    "armv8.2-a": "asimd atomics asimdrdm crc32",
    "dotprod": "asimddp",
}


def sets(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The instruction sets that flags of the compiler name: "-mavx2" one, "-march=armv8-a+dotprod" two."""
    return tuple(x for flag in flags for x in flag.removeprefix("-march=").removeprefix("-m").split("+"))


NEEDS = {
    level: frozenset(" ".join(_SYSTEM_NAMES.get(name, name) for name in sets(flags)).split())
    for level, flags in LEVELS.items()
}
"""The instruction sets that the code of a level may use, by the names of `processor.cpu_flags`."""
TILES = "amx_tile"
"""The instruction set whose registers the operating system must let a process use."""
MACHINES = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""The levels of architectures, as `platform.machine` names them, without the portable one, which all have."""


def known(machine: str | None = None) -> tuple[str, ...]:
    """The levels that an architecture (default: this one), as `platform.machine` names it, can have, best first."""
    return (*MACHINES.get(machine or platform.machine(), {}), "portable")


def runnable(flags: Set[str], tiles: bool) -> list[str]:
    """The levels, best first, that a CPU with these flags can run; those of tile registers where the operating system
    gives them (`tiles`). The flags are those that the system names: it leaves out what it or a virtual machine has
    turned off. No two architectures have a flag of the levels in common."""
    return [x for x in LEVELS if NEEDS[x] <= flags and (tiles or TILES not in NEEDS[x])]


def of_this_machine() -> list[str]:
    """`runnable` by this processor under this system."""
    flags = cpu_flags()
    return runnable(flags, tiles=TILES in flags and not tiles_refused())
