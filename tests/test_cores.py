"""The cores of this process, on files of machines and containers: quotas of control groups and performance cores; and
the limits of memory of nested control groups."""

import os
from pathlib import Path

import pytest

from headway import cores, hardware


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


QUOTAS = {
    "no files": ({}, None),
    "version 2, without a quota": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        None,
    ),
    "version 2, 2 CPUs": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "version 2, 2.5 CPUs": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
    "version 2, half a CPU": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "version 2, the parent's is less": (
        {
            "proc/self/cgroup": "0::/user.slice/job.scope\n",
            "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "600000 100000\n",
        },
        3,
    ),
    "version 1, 4 CPUs, the path of the host": (
        {
            "proc/self/cgroup": "4:memory:/docker/0f1e\n3:cpu,cpuacct:/docker/0f1e\n0::/docker/0f1e\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    "version 1, without a quota": (
        {
            "proc/self/cgroup": "3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_least_quota_of_the_groups_counts_in_whole_cpus(name: str, tmp_path: Path) -> None:
    files, expected = QUOTAS[name]
    assert cores.quota(machine(tmp_path, files)) == expected


def siblings(pairs: int, single: int = 0) -> dict[str, str]:
    texts = [f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}" for cpu in range(2 * pairs)]
    texts += [str(2 * pairs + cpu) for cpu in range(single)]
    folder = "sys/devices/system/cpu"
    return {f"{folder}/cpu{cpu}/topology/thread_siblings_list": text + "\n" for cpu, text in enumerate(texts)}


def capacities(*values: int) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": f"{value}\n" for cpu, value in enumerate(values)}


ALDER_LAKE = siblings(8, 8) | {"sys/devices/cpu_core/cpus": "0-15\n", "sys/devices/cpu_atom/cpus": "16-23\n"}
PERFORMANCE = {
    "Cascade Lake": (siblings(4), range(8), None),
    "Alder Lake, 8 + 8 cores": (ALDER_LAKE, range(24), 8),
    "Alder Lake, bound to 3 threads of performance cores": (ALDER_LAKE, (0, 1, 2), None),
    "Alder Lake, bound to 3 threads and an efficiency core": (ALDER_LAKE, (0, 1, 2, 20), 2),
    "Alder Lake, bound to efficiency cores": (ALDER_LAKE, range(16, 24), None),
    "4 + 4 cores of ARM": (capacities(446, 446, 446, 446, 1024, 1024, 1024, 1024), range(8), 4),
    "3 + 4 + 1 cores of ARM": (capacities(300, 300, 300, 880, 880, 880, 880, 1024), range(8), 5),
    "Graviton": (capacities(1024, 1024), range(2), None),
    "without files": ({}, range(4), None),
}


@pytest.mark.parametrize("name", PERFORMANCE)
def test_hybrid_processors_have_performance_cores(name: str, tmp_path: Path) -> None:
    files, available, expected = PERFORMANCE[name]
    assert cores.performance_cores(set(available), machine(tmp_path, files)) == expected


def test_numbers_of_processors_are_read() -> None:
    assert cores.processors("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cores.processors("\n") == set()


@pytest.mark.parametrize(
    ("fast", "allowed", "expected"), [(None, None, 8), (4, None, 4), (None, 3, 3), (4, 3, 3), (4, 64, 4)]
)
def test_cores_are_the_least_of_what_limits_them(
    monkeypatch: pytest.MonkeyPatch, fast: int | None, allowed: int | None, expected: int
) -> None:
    monkeypatch.setattr(cores, "affinity", lambda: set(range(8)))
    monkeypatch.setattr(cores, "performance_cores", lambda available: fast)
    monkeypatch.setattr(cores, "quota", lambda: allowed)
    assert cores.cores() == expected


@pytest.mark.parametrize(
    ("asked", "usable", "processes", "after"),
    [(False, 2, 1, "2"), (False, 8, 1, None), (True, 2, 1, None), (False, 2, 2, "1"), (False, 8, 3, "2")],
)
def test_threads_are_limited_unless_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch, asked: bool, usable: int, processes: int, after: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(cores, "ASKED", asked)
    monkeypatch.setattr(cores, "affinity", lambda: set(range(8)))
    monkeypatch.setattr(cores, "cores", lambda: usable)
    cores.limit_threads()  # as every command does first
    cores.limit_threads(processes)
    assert os.environ.get("OMP_NUM_THREADS") == after


def test_the_limits_of_memory_are_those_of_the_group_and_of_its_parents(tmp_path: Path) -> None:
    second = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "3000\n",
        "sys/fs/cgroup/a/memory.current": "900\n",
        "sys/fs/cgroup/a/memory.stat": "anon 500\ninactive_file 300\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "800\n",
    }
    assert [*hardware._group_limits(machine(tmp_path / "2", second))] == [(3000, 600)]
    first = {
        "proc/self/cgroup": "8:memory:/c\n",
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "2000\n",
        "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "700\n",
        "sys/fs/cgroup/memory/c/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
    }
    assert [*hardware._group_limits(machine(tmp_path / "1", first))] == [(2000, 500)]
