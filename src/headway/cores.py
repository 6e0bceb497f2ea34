"""How many CPU cores this process may use: its affinity, the CPU quota of its control group (cgroup), and on hybrid
processors the performance cores only. Imports the standard library only.

torch and OpenMP know the affinity alone: in a container with 2 CPUs of 64 they start 64 threads, which then wait for
each other; on a hybrid processor each product waits for its slowest core.
"""

import os
import sys
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath

from headway.processor import read, sysctl

ROOT = Path("/")
ASKED = "OMP_NUM_THREADS" in os.environ
"""Whether this process was started with a number of threads."""
FAST = 0.75
"""The share of the largest capacity from which on a core counts as a performance core: favoured cores have some per
cent more than others, efficiency cores a third to two thirds. https://docs.kernel.org/scheduler/sched-capacity.html"""


def cores() -> int:
    """Returns the number of cores that this process may use."""
    available = affinity()
    return min(len(available), performance_cores(available) or len(available), quota() or len(available))


def affinity() -> Set[int]:
    """Returns the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def performance_cores(available: Set[int], root: Path = ROOT) -> int | None:
    """Returns how many of the `available` processors are performance cores, counting the threads of a core once; None
    if all cores are alike, or the system does not say."""
    if sys.platform == "darwin" and root == ROOT:
        return sysctl("hw.perflevel0.physicalcpu") if sysctl("hw.nperflevels") > 1 else None
    folder = root / "sys/devices/system/cpu"
    names = {cpu: read(folder / f"cpu{cpu}/cpu_capacity").strip() for cpu in available}
    fast = processors(read(root / "sys/devices/cpu_core/cpus")) & available  # Intel's hybrid processors
    if not fast and all(name.isdigit() for name in names.values()):
        largest = max(int(name) for name in names.values())
        fast = {cpu for cpu, name in names.items() if int(name) >= FAST * largest}
    if not fast or fast == available:
        return None
    return len({read(folder / f"cpu{cpu}/topology/thread_siblings_list").strip() or cpu for cpu in fast})


def processors(text: str) -> Set[int]:
    """Returns the numbers in a list such as "0-3,8,10-11"."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}


def quota(root: Path = ROOT) -> int | None:
    """Returns the whole CPUs that the quotas of this process's control group and of its parents allow, at least 1; None
    without a quota. A quota of 2.5 gives 2: three threads would be stopped in every period."""
    shares = []
    for version, folder in groups("cpu", root):
        if version == 2:
            words = read(folder / "cpu.max").split()
        else:
            words = [read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        # the quota is "max" if there is none, in version 1 it is -1
        if len(words) == 2 and all(word.isdigit() for word in words):
            shares.append(int(words[0]) // int(words[1]))
    return max(1, min(shares)) if shares else None


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yields the version and the folder of this process's control group for "cpu" or "memory", and of its parents.

    In a container /proc may name a path of the host, of which only the last parent, the root, is there."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            if folder.is_dir():
                yield (1 if controllers else 2), folder


def limit_threads(processes: int = 1) -> None:
    """Makes OpenMP, MKL and torch start at most `cores()` threads, by OMP_NUM_THREADS; the share of each, if several
    `processes` are to be started. Does nothing if this process was started with a number. Must be called before torch
    is imported."""
    count = max(1, cores() // processes)
    if not ASKED and count < len(affinity()):
        os.environ["OMP_NUM_THREADS"] = str(count)
