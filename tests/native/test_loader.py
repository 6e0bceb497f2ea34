"""The best library that this CPU can run and that is of these sources, or none, and then why."""

import ctypes
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from headway import processor
from headway.errors import BackendError
from headway.native import build, levels, loader
from tests.native.conftest import OF_PAIRS, Small, Use, at_levels

ALL_LEVELS = levels.known()
BEST, *LOWER = levels.runnable(levels.NEEDS[ALL_LEVELS[0]], tiles=True)


def find(small: Small, wanted: str = "", level: str = BEST) -> loader.Found:
    """What is found for a CPU that has just this level."""
    return loader.find(small.folder, wanted, levels.NEEDS[level], small.sources)


def outdate(small: Small, level: str) -> None:
    """Makes one level's library one of other sources."""
    path = small.folder / build.file_name(level)
    right = build.source_hash(level, small.sources).encode()
    path.write_bytes(path.read_bytes().replace(right, b"0123456789abcdef"))


@pytest.mark.parametrize("level", levels.known())
def test_each_cpu_gets_the_best_level_that_it_can_run(small: Small, level: str) -> None:
    found = find(small, level=level)
    assert found.library is not None
    assert found.library.level == level
    assert found.why is found.trouble is None


@pytest.mark.parametrize("lacking", sorted(levels.NEEDS[BEST]))
def test_one_missing_instruction_set_rules_a_level_out(small: Small, lacking: str) -> None:
    found = loader.find(small.folder, "", levels.NEEDS[BEST] - {lacking}, small.sources)
    assert found.library is not None
    assert lacking not in levels.NEEDS[found.library.level]


def test_the_names_of_instruction_sets_are_those_of_the_system() -> None:
    """As Linux spells them: the best level is that of the newest instructions of its that are there."""
    flags = {"amx_int8": "amx", "avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni", "avx512f": "avx512"}
    flags |= {"avx_vnni": "avxvnni", "avx2": "avx2", "i8mm": "i8mm", "asimddp": "dotprod", "asimd": "neon"}
    system = Path("/proc/cpuinfo").read_text().split()
    level = next((level for flag, level in flags.items() if flag in system), "portable")
    assert levels.runnable(processor.cpu_flags(), tiles=True)[0] == level


REFUSED = "the system refuses tile registers (some error)"


@pytest.mark.skipif("amx" not in levels.known(), reason="this architecture has no tiles")
def test_the_next_level_takes_over_where_the_system_refuses_tiles(small: Small, tmp_path: Path) -> None:
    has = levels.NEEDS["amx"]
    found = loader.find(small.folder, "", has, small.sources, REFUSED)
    assert found.library is not None
    assert found.library.level == "avx512bf16"
    assert found.trouble == (
        f"headway runs its native kernels at level avx512bf16 only: {REFUSED}, which amx needs; "
        "HEADWAY_NATIVE=avx512bf16 is that without this warning"
    )
    assert loader.find(small.folder, "avx512bf16", has, small.sources, REFUSED).trouble is None
    with pytest.raises(
        BackendError, match=r"HEADWAY_NATIVE=amx cannot be had: .*\(some error\); .*take avx512bf16"
    ):
        loader.find(small.folder, "amx", has, small.sources, REFUSED)
    made = small.copy(tmp_path)
    outdate(made, "avx512bf16")
    found = loader.find(made.folder, "", has, made.sources, REFUSED)
    assert found.library is not None
    assert found.library.level == "avx512vnni"
    assert found.trouble is not None
    assert "libheadway_avx512bf16.so is stale" in found.trouble
    assert f"and {REFUSED}, which amx needs" in found.trouble


@pytest.mark.parametrize(("asked", "asks"), [("", True), ("amx", True), ("avx512bf16", False), ("0", False)])
def test_the_system_is_asked_for_tiles_where_they_would_be_used(
    asked: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("HEADWAY_NATIVE", asked)
    monkeypatch.setattr(loader, "cpu_flags", lambda: levels.NEEDS[BEST])
    monkeypatch.setattr(loader, "tiles_refused", lambda: said.append("asked") or REFUSED)
    monkeypatch.setattr(loader, "find", lambda *_, refused: loader.Found(None, refused))
    assert loader.search.__wrapped__().why == (REFUSED if asks and "amx" in ALL_LEVELS else "")
    assert bool(said) == (asks and "amx" in ALL_LEVELS)


@pytest.mark.parametrize("level", levels.known())
def test_a_level_can_be_asked_for(small: Small, level: str) -> None:
    found = find(small, level, level)
    assert found.library is not None
    assert found.library.level == level


def test_turned_off_is_no_trouble(small: Small) -> None:
    why = "HEADWAY_NATIVE=0 turns the native kernels off; unset it to use them"
    assert find(small, "0") == loader.Found(None, why)


def test_a_level_that_is_not_to_be_had_is_an_error(small: Small, tmp_path: Path) -> None:
    with pytest.raises(
        BackendError, match=r"HEADWAY_NATIVE=portabel names no level \(did you mean \"portable\"\?\)"
    ):
        find(small, "portabel")
    if LOWER:
        with pytest.raises(
            BackendError,
            match=r"HEADWAY_NATIVE=avx2 is beyond this CPU, which lacks .*fma.*; .*take portable",
        ):
            find(small, "avx2", "portable")
    with pytest.raises(BackendError, match=f"{BEST} was not built in {tmp_path}; .*headway.native.build"):
        find(Small(tmp_path, small.sources), BEST)
    made = small.copy(tmp_path)
    outdate(made, BEST)
    with pytest.raises(BackendError, match=f"HEADWAY_NATIVE={BEST} cannot be had: .* is stale"):
        find(made, BEST)


def test_a_stale_library_is_not_used(small: Small, tmp_path: Path) -> None:
    made = small.copy(tmp_path)
    with (made.sources / "measure.cpp").open("a") as file:
        file.write("// another\n")
    found = find(made)
    assert found.library is None
    assert found.trouble == f"headway runs without its native kernels: {found.why}"
    assert found.why is not None
    assert f"{build.file_name(BEST)} is stale (built from sources" in found.why
    assert "build them: python -m headway.native.build" in found.why
    for level in LOWER:
        assert level in found.why.split("are unusable too")[0]


@pytest.mark.skipif(not LOWER, reason="this architecture has one level")
@pytest.mark.parametrize("damage", ["stale", "missing", "cut"])
@pytest.mark.parametrize("level", levels.known()[:-1])
def test_the_next_level_takes_over_from_one_that_is_unusable(
    small: Small, tmp_path: Path, damage: str, level: str
) -> None:
    made = small.copy(tmp_path)
    path = made.folder / build.file_name(level)
    words = {
        "stale": "is stale",
        "missing": f"{level} was not built",
        "cut": "cannot be opened",
    }
    if damage == "stale":
        outdate(made, level)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(f"headway-source-hash:{build.source_hash(level, made.sources)}\0".encode())
    found = loader.find(made.folder, "", levels.NEEDS[level], made.sources)
    others = [x for x in levels.runnable(levels.NEEDS[level], tiles=True) if x != level]
    assert found.library is not None
    assert found.library.level == others[0]
    assert found.trouble is not None
    assert found.trouble.startswith(f"headway runs its native kernels at level {others[0]} only: ")
    assert words[damage] in found.trouble


def test_without_libraries_it_says_what_to_do(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Small(tmp_path, small.sources)
    assert find(empty).why == f"none were built in {tmp_path}; build them: python -m headway.native.build"
    monkeypatch.setenv("CXX", "/nonexistent")
    why = find(empty).why
    assert why is not None
    assert why.startswith(
        f"none were built in {tmp_path}; no C++ compiler: CXX=/nonexistent names no program"
    )
    assert why.endswith("; then python -m headway.native.build")


def test_trouble_is_announced_once(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(Small(tmp_path, small.sources))
    monkeypatch.setattr(loader, "search", lambda: found)
    loader._announce.cache_clear()
    assert loader.why_missing() == found.why
    with pytest.warns(
        UserWarning, match="headway runs without its native kernels: none were built"
    ) as caught:
        assert loader.library() is None
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.library() is None


def test_the_environment_decides_once_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = loader.search.__wrapped__
    monkeypatch.setenv("HEADWAY_NATIVE_DIR", str(tmp_path))
    monkeypatch.delenv("HEADWAY_NATIVE", raising=False)
    assert f"none were built in {tmp_path}" in search().why
    monkeypatch.setenv("HEADWAY_NATIVE", "0")
    assert "HEADWAY_NATIVE=0" in search().why
    monkeypatch.setenv("HEADWAY_NATIVE", "avx1024")
    with pytest.raises(BackendError, match="avx1024"):
        search()


@at_levels(1)
def test_roofs_are_those_of_a_machine_and_bf16_has_one_where_there_is_an_instruction(
    use: Use, level: str
) -> None:
    """Within three orders of magnitude of what machines do: nothing here is fast or slow.

    Of several tries the best: one of 10 ms may fall wholly into another process's turn.
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
    with pytest.raises(BackendError, match=r"float32 or bfloat16, not of torch\.float16"):
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
    """The exclusive or of all words is that of numpy, wherever the bytes are cut into parts and streams."""
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
    """In a process of its own, which would crash: no call of the kernels has a team that large."""
    done = process(CROWD, small)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


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
    done = process(FORK, small)
    assert done.stdout.split() == ["7", "2"], done.stderr


@pytest.mark.skipif(not shutil.which("g++") or sys.platform != "linux", reason="GNU's OpenMP, on Linux")
def test_the_library_shares_torchs_openmp(small: Small) -> None:
    script = (
        "library.peak(threads=2, seconds=0.01); torch.ones(1 << 20).sum()\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(*{line.split()[-1] for line in lines if 'omp' in os.path.basename(line.split()[-1])})"
    )
    done = process(script, small)
    assert len(done.stdout.split()) == 1, done.stdout + done.stderr
