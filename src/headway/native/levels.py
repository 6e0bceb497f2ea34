"""The levels of processors that kernels are compiled for, and which of them a processor has. Imports the standard
library only."""

import platform
from collections.abc import Set

from headway.processor import cpu_flags, tiles_refused

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)
_VNNI = ("-mavx512vnni", *_AVX512)
_BF16 = ("-mavx512bf16", "-mavx512vbmi2", *_VNNI)
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": ("-mamx-tile", "-mamx-int8", *_BF16),
    "avx512bf16": _BF16,
    "avx512vnni": _VNNI,
    "avx512": _AVX512,
    "avxvnni": ("-mavxvnni", *_AVX2),
    "avx2": _AVX2,
    "portable": (),
}
"""The CPU levels, best first, and the instruction sets that each may use; `csrc/vec_LEVEL.h` has what it does with
them. Never -march=native: a library is built where it does not run."""
STANDS_ON = {"amx": "avx512bf16", "avx512vnni": "avx512", "avxvnni": "avx2"}
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
}
NEEDS = {
    level: frozenset(_SYSTEM_NAMES.get(flag[2:], flag[2:]) for flag in flags)
    for level, flags in LEVELS.items()
}
"""What the code of a level may use, as `processor.cpu_flags` names it."""
TILES = "amx_tile"
"""The instruction set whose registers the operating system must let a process use."""


MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")
"""The architectures that wheels are for, as `platform.machine` names them."""


def known(machine: str | None = None) -> tuple[str, ...]:
    """The levels that an architecture (default: this one), as `platform.machine` names it, can have, best first."""
    return tuple(LEVELS) if (machine or platform.machine()) in ("x86_64", "AMD64") else ("portable",)


def runnable(flags: Set[str], tiles: bool) -> list[str]:
    """The levels, best first, that a CPU with these flags can run; those of tile registers where the operating system
    gives them (`tiles`). The flags are those that the system names: it leaves out what it or a virtual machine has
    turned off."""
    return [x for x in known() if NEEDS[x] <= flags and (tiles or TILES not in NEEDS[x])]


def of_this_machine() -> list[str]:
    """`runnable` by this processor under this system."""
    flags = cpu_flags()
    return runnable(flags, tiles=TILES in flags and not tiles_refused())
