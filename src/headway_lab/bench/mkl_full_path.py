"""torch with MKL's full path on AMD processors: the other baseline.

MKL takes its widest code only on what it detects as an Intel processor, and detects it by a function of its own; one
line of C, loaded before it, answers yes. Nothing else changes, and the library that torch ships is the one that runs.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from headway.hardware import cpu_vendor

SHIM = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"


def why_not() -> str | None:
    """Why there is no such baseline here; None where there is."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it is made for Linux on x86-64"
    if not torch.backends.mkl.is_available():
        return "this torch has no MKL"
    if "GenuineIntel" in cpu_vendor():
        return "this is an Intel processor: MKL takes its full path already"
    if compiler() is None:
        return "it needs a C compiler (cc, gcc or clang, or CC), and none was found"
    return None


def compiler() -> str | None:
    """The C compiler at hand."""
    names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    return next((path for name in names if (path := shutil.which(name.split()[0]))), None)


def environment(folder: Path) -> dict[str, str]:
    """Compile the one line into `folder`; the variables of a process that loads it first."""
    found = compiler()
    assert found is not None, "ask why_not() first"
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run(
        [found, "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True, capture_output=True
    )
    before = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library} {before}" if before else str(library)}
