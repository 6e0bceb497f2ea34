"""What the kernels measure of a machine, and how many threads they use on it."""

import ctypes
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from headway.errors import BackendError
from headway.native import loader
from tests.native.conftest import OF_PAIRS, Small, Use, at_levels


@at_levels(1)
def test_roofs_are_those_of_a_machine_and_bf16_has_one_where_there_is_an_instruction(
    use: Use, level: str
) -> None:
    """Within three orders of magnitude of real machines: this is no test of speed.

    The best of several tries counts: one of 10 ms may fall wholly into another process's turn.
    """
    use(level)
    library = loader.search().library
    assert library is not None
    for threads in (1, 2):
        for dtype, present in ((torch.float32, True), (torch.bfloat16, level in OF_PAIRS)):
            peak = max(library.peak(dtype, threads, seconds=0.01) for _ in range(5))
            assert 1e9 < peak < 1e14 if present else peak == 0
    for size in (0, 1, 1001, 1 << 20):
        for threads in (1, 2, 3):
            assert library.read_seconds(torch.ones(size), threads) >= 0
    assert 1e-5 < library.read_seconds(torch.ones(1 << 22), 1) < 10


def test_roofs_are_of_what_can_be_measured(small: Small) -> None:
    library = loader.open_library(small.folder, "portable", small.sources)
    with pytest.raises(BackendError, match=r"float32 or bfloat16, not torch\.float16"):
        library.peak(torch.float16)
    with pytest.raises(
        BackendError, match=r"contiguous tensors on the CPU, not \(2, 3\) with strides \(1, 2\)"
    ):
        library.read_seconds(torch.ones(3, 2).T)
    with pytest.raises(BackendError, match="on meta"):
        library.read_seconds(torch.ones(3, device="meta"))


def process(script: str, small: Small) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process that uses two threads; `library` is the portable one."""
    start = (
        "import os, sys, torch\nfrom pathlib import Path\nfrom headway.native import loader\n"
        "library = loader.open_library(Path(sys.argv[1]), 'portable', Path(sys.argv[2]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", start + script, str(small.folder), str(small.sources)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    )


@at_levels(2)
def test_each_byte_is_read_once(small: Small, level: str) -> None:
    """The exclusive or of all words is that of numpy, however the bytes are divided into parts and streams."""
    library = loader.open_library(small.folder, level, small.sources)
    data = np.random.default_rng(0).integers(0, 256, 1 << 14, np.uint8)
    for count in (0, 1, 7, 8, 63, 64, 65, 191, 256, 257, 1000, 1024, 4097, 1 << 14):
        words = np.zeros(-(-count // 8), np.uint64)
        words.view(np.uint8)[:count] = data[:count]
        for threads in (1, 2, 3, 5):
            folded = ctypes.c_uint64(7)
            assert library.dll.headway_read(data.ctypes.data, count, threads, folded) >= 0
            assert folded.value == int(np.bitwise_xor.reduce(words)), (count, threads)


CROWD = """
torch.get_num_threads = lambda: 100_000
assert loader.threads() == loader.MOST_THREADS
for threads in (0, 100_000):
    try:
        library.peak(threads=threads)
    except loader.BackendError as error:
        assert f'threads must be in 1..{loader.MOST_THREADS} on this machine, got {threads}' == str(error)
print(library.dll.headway_peak(0, 100_000, 0.001) > 0)
"""


def test_more_threads_than_openmp_can_start_are_neither_asked_for_nor_started(small: Small) -> None:
    """The process of this test would crash if a call of the kernels had a team that large."""
    result = process(CROWD, small)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


FORK = """
assert loader.threads() == 2
library.peak(seconds=0.01)
child = os.fork()
if child == 0:
    assert loader.threads() == 1
    torch.set_num_threads(2)
    assert loader.threads() == 1
    assert library.peak(seconds=0.01) > 0
    assert library.read_seconds(torch.ones(1000)) >= 0
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), loader.threads())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_runs_on_one_thread(small: Small) -> None:
    result = process(FORK, small)
    assert result.stdout.split() == ["7", "2"], result.stderr


@pytest.mark.skipif(not shutil.which("g++") or sys.platform != "linux", reason="GNU's OpenMP, on Linux")
def test_the_library_shares_torchs_openmp(small: Small) -> None:
    script = (
        "library.peak(threads=2, seconds=0.01); torch.ones(1 << 20).sum()\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(*{line.split()[-1] for line in lines if 'omp' in os.path.basename(line.split()[-1])})"
    )
    result = process(script, small)
    assert len(result.stdout.split()) == 1, result.stdout + result.stderr
