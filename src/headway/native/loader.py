"""Finds the best native library for this CPU, checks that it was built from these sources, and opens it once per
process.

The variable HEADWAY_NATIVE takes `0` (no native kernels) or a level (that one or an error); HEADWAY_NATIVE_DIR names
another folder of libraries. If a library is unusable, a warning says so once, and other backends are used instead.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from headway.errors import BackendError, BuildError, as_error, did_you_mean
from headway.native import build, levels
from headway.native.levels import NEEDS, TILES, runnable
from headway.processor import cpu_flags, tiles_refused
from headway.threads import MOST_THREADS


@dataclass(frozen=True)
class Library:
    """An open native library: its level, its file, and the loaded functions in `dll`."""

    level: str
    path: Path
    dll: ctypes.CDLL

    def peak(
        self, dtype: torch.dtype = torch.float32, threads: int | None = None, seconds: float = 0.2
    ) -> float:
        """Measures the peak of this level in FLOP/s: multiply-adds (2 each) of `threads` threads (default: `threads()`)
        that never leave the registers, the best rate within `seconds`.

        bfloat16 products are accumulated in float32; returns 0.0 if the level has no instruction for them. Raises
        BackendError for another dtype."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise BackendError(f"peak measures products of float32 or bfloat16, not {dtype}")
        return float(self.dll.headway_peak(int(dtype == torch.bfloat16), _count(threads), seconds))

    def read_seconds(self, tensor: Tensor, threads: int | None = None) -> float:
        """Returns the seconds in which `threads` threads (default: `threads()`) read the tensor's bytes once, in
        parallel.

        This is a lower bound for every kernel that reads these bytes from where they are: from memory if the tensor is
        several times as large as the last-level cache. Raises BackendError unless the tensor is contiguous on the CPU.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise BackendError(
                f"read_seconds reads contiguous tensors on the CPU, not {tuple(tensor.shape)} with strides "
                f"{tensor.stride()} on {tensor.device}; give it tensor.cpu().contiguous()"
            )
        words = ctypes.c_uint64()
        return float(self.dll.headway_read(tensor.data_ptr(), tensor.nbytes, _count(threads), words))


@dataclass(frozen=True)
class Found:
    """The result of a search: a library, or the reason `why` there is none; `trouble` is a warning to issue."""

    library: Library | None
    why: str | None = None
    trouble: str | None = None


def library() -> Library | None:
    """Returns the best native library for this CPU, opened once per process; None if there is none (see `why_missing`).

    Raises BackendError if HEADWAY_NATIVE names a level that is not available."""
    result = search()
    if result.trouble:
        _announce(result.trouble)
    return result.library


def why_missing() -> str | None:
    """Returns why `library()` is None and what to do about it; None if there is a library."""
    return search().why


@cache
def search() -> Found:
    """Returns the result of `find` for this process's environment and CPU."""
    folder = Path(os.environ.get("HEADWAY_NATIVE_DIR") or build.LIBRARIES)
    wanted, flags = os.environ.get("HEADWAY_NATIVE", ""), cpu_flags()
    wants_tiles = any(wanted in ("", x) and TILES in NEEDS[x] for x in runnable(flags, tiles=True))
    return find(folder, wanted, flags, refused=tiles_refused() if wants_tiles else "")


@cache
def _announce(trouble: str) -> None:
    warnings.warn(trouble, stacklevel=3)


def find(
    folder: Path, wanted: str, flags: Set[str], sources: Path = build.SOURCES, refused: str = ""
) -> Found:
    """Returns the best library in `folder` that was built from `sources`, for a CPU with these flags. `wanted` is the
    value of HEADWAY_NATIVE, "" for the best level; `refused` says why the system grants no tile registers, "" if it
    does.

    Raises BackendError if a wanted level is unknown, not supported by this CPU, refused, missing or unusable."""
    if wanted == "0":
        return Found(None, "HEADWAY_NATIVE=0 turns the native kernels off; unset it to use them")
    known = levels.known()
    if wanted and wanted not in known:
        raise BackendError(
            f"HEADWAY_NATIVE={wanted} is not a level{did_you_mean(wanted, known)}; "
            f"known: 0 (no native kernels), {', '.join(known)}"
        )
    supported = runnable(flags, tiles=not refused)
    denied = [level for level in runnable(flags, tiles=True) if level not in supported]
    if wanted in denied:
        raise BackendError(
            f"HEADWAY_NATIVE={wanted} is not available: {refused}; unset it, or use {supported[0]}"
        )
    if wanted and wanted not in supported:
        raise BackendError(
            f"HEADWAY_NATIVE={wanted} cannot run on this CPU, which lacks {', '.join(sorted(NEEDS[wanted] - flags))}; "
            f"unset it, or use {supported[0]}"
        )
    failures: dict[str, str] = {}
    for level in [wanted] if wanted else supported:
        try:
            opened = open_library(folder, level, sources)
        except BackendError as error:
            failures[level] = str(error)
            continue
        reasons = [_mend(failures)] if failures else []
        if denied and not wanted:
            reasons.append(
                f"{refused}, which {denied[0]} needs; set HEADWAY_NATIVE={level} to silence this warning"
            )
        trouble = f"headway runs its native kernels at level {level} only: {'; and '.join(reasons)}"
        return Found(opened, trouble=trouble if reasons else None)
    if wanted:
        raise BackendError(f"HEADWAY_NATIVE={wanted} is not available: {_mend(failures)}")
    if not any((folder / build.file_name(level)).exists() for level in supported):
        failures = {"": f"none were built in {folder}"}
    why = _mend(failures)
    return Found(None, why, f"headway runs without its native kernels: {why}")


def _mend(amiss: dict[str, str]) -> str:
    """Returns a sentence: why the best level is unusable, which other levels are too, and how to fix it."""
    (_, first_reason), *other_levels = amiss.items()
    also = f", and {', '.join(level for level, _ in other_levels)} are unusable too" if other_levels else ""
    try:
        build.compiler()
        todo = f"build them: {build.COMMAND}"
    except BuildError as error:
        todo = f"{error}; then {build.COMMAND}"
    return f"{first_reason}{also}; {todo}"


def open_library(folder: Path, level: str, sources: Path = build.SOURCES) -> Library:
    """Opens the library of one level. Raises BackendError if it is missing, stale, not headway's, or cannot be
    opened."""
    path = folder / build.file_name(level)
    if not path.exists():
        raise BackendError(f"{level} was not built in {folder}")
    built, here = build.built_hash(path) or "unknown", build.source_hash(level, sources)
    if built != here:
        raise BackendError(f"{path} is stale (built from sources {built}, the current ones are {here})")
    with as_error(BackendError, f"{path} cannot be opened", OSError, AttributeError):
        if sys.platform == "darwin":  # torch has opened it, but its symbols are not global
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libomp.dylib"), mode=ctypes.RTLD_GLOBAL)
        dll = ctypes.CDLL(str(path))
        _declare(dll)
    return Library(level, path, dll)


def _declare(dll: ctypes.CDLL) -> None:
    number, real, address = ctypes.c_int, ctypes.c_double, ctypes.c_void_p
    dll.headway_peak.restype, dll.headway_peak.argtypes = real, [number, number, real]
    dll.headway_read.restype, words = real, ctypes.POINTER(ctypes.c_uint64)
    dll.headway_read.argtypes = [address, ctypes.c_int64, number, words]


_forked = Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked.set)


def threads() -> int:
    """Returns the number of threads that a kernel may use: torch's, at most `MOST_THREADS`, and 1 in a forked process.

    GNU's OpenMP hangs in a forked child whose parent has used it, because the threads of its pool do not exist there.
    """
    return 1 if _forked.is_set() else min(torch.get_num_threads(), MOST_THREADS)


def _count(number: int | None) -> int:
    """Returns `number`, or `threads()` if it is None. Raises BackendError if it is below 1 or above `MOST_THREADS`."""
    if number is not None and not 1 <= number <= MOST_THREADS:
        raise BackendError(f"threads must be in 1..{MOST_THREADS} on this machine, got {number}")
    return threads() if number is None else number
