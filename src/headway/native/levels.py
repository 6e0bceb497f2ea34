"""The CPU levels that kernels are compiled for, and which of them a processor supports. Imports the standard library
only."""

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
"""The compiler flags of each level, best level first within an architecture: the instruction sets that it may use, as
`csrc/vec_LEVEL.h` does. Never -march=native: the machine that builds a library is not the one that runs it."""
STANDS_ON = {"amx": "avx512bf16", "avx512vnni": "avx512", "avxvnni": "avx2", "dotprod": "neon"}
OWN = ("linear.cpp", "measure.cpp", "step.cpp")
"""STANDS_ON: levels that differ from a base level only in 8-bit integer products. OWN: the sources with such products;
all other sources are compiled once, for the base level."""

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
    """Returns the instruction sets that compiler flags name: "-mavx2" names one, "-march=armv8-a+dotprod" two."""
    return tuple(x for flag in flags for x in flag.removeprefix("-march=").removeprefix("-m").split("+"))


NEEDS = {
    level: frozenset(" ".join(_SYSTEM_NAMES.get(name, name) for name in sets(flags)).split())
    for level, flags in LEVELS.items()
}
"""The instruction sets that a level needs, under the names that `processor.cpu_flags` returns."""
TILES = "amx_tile"
"""The instruction set whose registers a process may use only with the operating system's permission."""
MACHINES = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""The levels of each architecture, keyed by `platform.machine()`, without "portable", which all architectures have."""


def known(machine: str | None = None) -> tuple[str, ...]:
    """Returns the levels of an architecture (default: this one), named as by `platform.machine`, best first."""
    return (*MACHINES.get(machine or platform.machine(), {}), "portable")


def runnable(flags: Set[str], tiles: bool) -> list[str]:
    """Returns the levels, best first, that a CPU with these flags can run; levels with tile registers only if the
    operating system grants them (`tiles`). The flags are those that the system reports: it omits what it or a virtual
    machine has turned off. No flag of a level exists on two architectures."""
    return [x for x in LEVELS if NEEDS[x] <= flags and (tiles or TILES not in NEEDS[x])]


def of_this_machine() -> list[str]:
    """Returns the levels, best first, that this processor can run under this operating system."""
    flags = cpu_flags()
    return runnable(flags, tiles=TILES in flags and not tiles_refused())
