"""The processor's name, vendor and instruction sets, as the operating system reports them.

Imports only the standard library, because the installation uses it too."""

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

CPU = Path("/proc/cpuinfo")


@cache
def cpu_name() -> str:
    """Returns the processor's name as the system reports it, with family and model if the name has no digits.

    Virtual machines report names without digits: "AMD EPYC, family 25 model 17" is another generation than family
    26."""
    cpu = fields(CPU)
    name = cpu.get("model name") or platform.processor() or platform.machine()
    if any(c.isdigit() for c in name) or not {"cpu family", "model"} <= cpu.keys():
        return name
    return f"{name}, family {cpu['cpu family']} model {cpu['model']}"


def cpu_vendor() -> str:
    """Returns the processor's vendor ("GenuineIntel") as the system reports it; empty if it does not."""
    return fields(CPU).get("vendor_id", "")


APPLE = {
    "AdvSIMD": "asimd",
    "FEAT_LSE": "atomics",
    "FEAT_RDM": "asimdrdm",
    "armv8_crc32": "crc32",
    "FEAT_FP16": "asimdhp",
    "FEAT_DotProd": "asimddp",
    "FEAT_I8MM": "i8mm",
    "FEAT_BF16": "bf16",
}
"""Linux's names of instruction sets, by macOS's names (prefixed there by "hw.optional.arm." or "hw.optional.")."""


@cache
def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets that the system reports, by Linux's names ("avx2", "avx512_bf16", on ARM "bf16").

    Empty if it reports none."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        present = {
            name for name in APPLE if sysctl(f"hw.optional.arm.{name}") or sysctl(f"hw.optional.{name}")
        }
        return frozenset(APPLE[name] for name in present)
    cpu = fields(CPU)
    return frozenset((cpu.get("flags") or cpu.get("Features", "")).split())


@cache
def tiles_refused() -> str:
    """Returns why this process may not use the AMX tile registers; "" if it may.

    Linux saves their state, 8 KiB per thread, only for processes that request it: this function makes the request,
    which covers all threads and forked processes. https://docs.kernel.org/arch/x86/xstate.html"""
    arch_prctl, request, tile_data = 158, 0x1023, 18  # SYS_, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"AMX tile registers need Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*(ctypes.c_long(word) for word in (arch_prctl, request, tile_data))) == 0:
        return ""
    return f"the system refuses AMX tile registers (arch_prctl, ARCH_REQ_XCOMP_PERM: {os.strerror(ctypes.get_errno())})"


def sysctl(name: str) -> int:
    """Returns macOS's integer value of this name; 0 if there is none. Not run on such a machine yet."""
    value, size = ctypes.c_int64(), ctypes.c_size_t(8)
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return 0 if failed else value.value


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def fields(path: Path) -> dict[str, str]:
    """Returns the first value of each key in a file with lines such as "key : value" or "key value"."""
    values: dict[str, str] = {}
    for line in read(path).splitlines():
        key, _, value = line.partition(":" if ":" in line else " ")
        values.setdefault(key.strip(), value.strip())
    return values
