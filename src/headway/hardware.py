"""Properties of this machine's CPU and memory, measured instead of taken from data sheets. Imports torch only.

Measurements run once per process, take a fraction of a second and are cached: they are the roofline limits that reports
relate their rates to. A busy machine measures low; nothing here corrects for that.
"""

import ctypes
import mmap
import os
import resource
import sys
import timeit
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headway.cores import ROOT, groups
from headway.errors import BackendError
from headway.processor import cpu_flags, fields, read

MEASURE_SECONDS = 0.15
LARGE_PAGE = 2 << 20
MEMORY, STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
MULTIPLIES = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""CPU flags of the instruction sets that multiply 16-bit floating-point numbers, by dtype."""


@cache
def gemm_peak(dtype: torch.dtype = torch.float32) -> float:
    """Returns the peak rate of torch's matrix product on this CPU at the current thread count, in FLOP/s (2 n^3 per
    product).

    Raises BackendError if `dtype` is not a floating-point dtype."""
    if not dtype.is_floating_point:
        raise BackendError(
            f"gemm_peak measures floating-point products, not {dtype}; ask for float32 or bfloat16"
        )
    for n in (256, 512, 1024, 2048):  # until one product is long enough to be timed well
        a = torch.ones(n, n, dtype=dtype)
        seconds = _best(lambda a=a: a @ a, repeats=6 if n <= 512 else 3)  # type: ignore[misc]
        if seconds > 0.05:
            break
    best = _best(lambda: a @ a, repeats=max(2, int(MEASURE_SECONDS / seconds)))
    return 2.0 * n**3 / min(seconds, best)


@cache
def read_bandwidth() -> float:
    """Returns the peak rate at which a sum reads memory at the current thread count, in bytes/s.

    The array is 256 MiB, several times the size of any cache, or an eighth of the available memory if that is less."""
    count = min(64 << 20, memory_available() // 8 // 4)
    x = torch.ones(max(count, 1 << 20), dtype=torch.float32)
    return x.numel() * x.element_size() / _best(x.sum, repeats=8)


def large_pages(tensors: Iterable[Tensor]) -> None:
    """Asks the system to back CPU tensors that nothing has been written to yet by huge pages of 2 MB.

    Memory that is read once from end to end, like weights in decoding, is then read up to a half faster. This is a
    hint: if the system has no huge pages, or none are free, nothing changes."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    madvise = ctypes.CDLL(None).madvise
    for t in tensors:
        # whole large pages inside the tensor: the beginning is rounded up, the end down
        begin, end = (
            -(-t.data_ptr() // LARGE_PAGE) * LARGE_PAGE,
            (t.data_ptr() + t.nbytes) // LARGE_PAGE * LARGE_PAGE,
        )
        if t.device.type == "cpu" and begin < end:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(advice))


def keep_freed_memory() -> bool:
    """Makes this process keep freed memory for later allocations instead of returning it to the system.

    A training step then takes no page faults, which are 3 to 7 % of its time. Sets glibc's malloc (`mallopt`: the mmap
    and trim thresholds out of reach, thread heaps grown by 64 MiB). Returns False, and changes nothing, without
    `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    settings = {mmap_threshold: 2**31 - 1, trim_threshold: 2**31 - 1, top_pad: 64 << 20}
    return all(mallopt(setting, size) for setting, size in settings.items())


def _best(run: Callable[[], Tensor], repeats: int) -> float:
    with torch.inference_mode():
        run()
        return min(timeit.repeat(run, number=1, repeat=repeats))


def memory_total() -> int:
    """Returns the bytes of memory that this process may use: the machine's, or the least limit of its control groups if
    less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _group_limits())])


def memory_available() -> int:
    """Returns the bytes that can be allocated now without swapping: the machine's, or what its control groups leave if
    less."""
    available = _kilobytes(MEMORY, "MemAvailable") or memory_total()
    return min([available, *(max(0, limit - used) for limit, used in _group_limits())])


def peak_rss() -> int:
    """Returns the peak resident memory of this process, in bytes.

    On Linux it is read from /proc: getrusage inherits the peak of the process that started this one.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _kilobytes(STATUS, "VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def multiplies(dtype: torch.dtype) -> bool:
    """Returns whether this CPU multiplies bfloat16 (or float16) in hardware.

    Without it bfloat16 saves memory but costs time, and a float16 product is hundreds of times slower than a bfloat16
    one."""
    return bool(cpu_flags() & MULTIPLIES[dtype])


def _kilobytes(path: Path, name: str) -> int | None:
    value = fields(path).get(name)
    return None if value is None else int(value.split()[0]) * 1024


def _group_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Yields the limit of each control group of this process that has one, and the bytes that it uses, without the page
    cache that the kernel frees on demand."""
    for version, folder in groups("memory", root):
        names, cache = ("limit_in_bytes", "usage_in_bytes"), "total_inactive_file"
        if version == 2:
            names, cache = ("max", "current"), "inactive_file"
        limit, used = (read(folder / f"memory.{name}").strip() for name in names)
        if limit.isdigit() and used.isdigit():  # the limit is "max" if there is none
            yield int(limit), int(used) - int(fields(folder / "memory.stat").get(cache, 0))
