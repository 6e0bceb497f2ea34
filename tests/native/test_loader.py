"""The loader takes the best library that this CPU can run and that is built from these sources, or says why not."""

import warnings
from pathlib import Path

import pytest

from headway import processor
from headway.errors import BackendError
from headway.native import build, levels, loader
from tests.native.conftest import Small

ALL_LEVELS = levels.known()
BEST, *LOWER = levels.runnable(levels.NEEDS[ALL_LEVELS[0]], tiles=True)


def find(small: Small, wanted: str = "", level: str = BEST) -> loader.Found:
    """Returns the result of a search on a CPU that has just this level."""
    return loader.find(small.folder, wanted, levels.NEEDS[level], small.sources)


def outdate(small: Small, level: str) -> None:
    """Makes one level's library look as if built from other sources."""
    path = small.folder / build.file_name(level)
    source_hash = build.source_hash(level, small.sources).encode()
    path.write_bytes(path.read_bytes().replace(source_hash, b"0123456789abcdef"))


@pytest.mark.parametrize("level", levels.known())
def test_each_cpu_gets_the_best_level_that_it_can_run(small: Small, level: str) -> None:
    result = find(small, level=level)
    assert result.library is not None
    assert result.library.level == level
    assert result.why is result.trouble is None


@pytest.mark.parametrize("lacking", sorted(levels.NEEDS[BEST]))
def test_one_missing_instruction_set_rules_a_level_out(small: Small, lacking: str) -> None:
    result = loader.find(small.folder, "", levels.NEEDS[BEST] - {lacking}, small.sources)
    assert result.library is not None
    assert lacking not in levels.NEEDS[result.library.level]


def test_the_names_of_instruction_sets_are_those_of_the_system() -> None:
    """As Linux spells them: the best level is that of the newest instructions that the system lists."""
    flags = {"amx_int8": "amx", "avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni", "avx512f": "avx512"}
    flags |= {"avx_vnni": "avxvnni", "avx2": "avx2", "i8mm": "i8mm", "asimddp": "dotprod", "asimd": "neon"}
    system = Path("/proc/cpuinfo").read_text().split()
    level = next((level for flag, level in flags.items() if flag in system), "portable")
    assert levels.runnable(processor.cpu_flags(), tiles=True)[0] == level


REFUSED = "the system refuses AMX tile registers (some error)"


@pytest.mark.skipif("amx" not in levels.known(), reason="this architecture has no tiles")
def test_the_next_level_takes_over_where_the_system_refuses_tiles(small: Small, tmp_path: Path) -> None:
    flags = levels.NEEDS["amx"]
    result = loader.find(small.folder, "", flags, small.sources, REFUSED)
    assert result.library is not None
    assert result.library.level == "avx512bf16"
    assert result.trouble == (
        f"headway runs its native kernels at level avx512bf16 only: {REFUSED}, which amx needs; "
        "set HEADWAY_NATIVE=avx512bf16 to silence this warning"
    )
    assert loader.find(small.folder, "avx512bf16", flags, small.sources, REFUSED).trouble is None
    with pytest.raises(
        BackendError, match=r"HEADWAY_NATIVE=amx is not available: .*\(some error\); .*use avx512bf16"
    ):
        loader.find(small.folder, "amx", flags, small.sources, REFUSED)
    copied = small.copy(tmp_path)
    outdate(copied, "avx512bf16")
    result = loader.find(copied.folder, "", flags, copied.sources, REFUSED)
    assert result.library is not None
    assert result.library.level == "avx512vnni"
    assert result.trouble is not None
    assert "libheadway_avx512bf16.so is stale" in result.trouble
    assert f"and {REFUSED}, which amx needs" in result.trouble


@pytest.mark.parametrize(("asked", "asks"), [("", True), ("amx", True), ("avx512bf16", False), ("0", False)])
def test_the_system_is_asked_for_tiles_where_they_would_be_used(
    asked: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setenv("HEADWAY_NATIVE", asked)
    monkeypatch.setattr(loader, "cpu_flags", lambda: levels.NEEDS[BEST])
    monkeypatch.setattr(loader, "tiles_refused", lambda: calls.append("asked") or REFUSED)
    monkeypatch.setattr(loader, "find", lambda *_, refused: loader.Found(None, refused))
    assert loader.search.__wrapped__().why == (REFUSED if asks and "amx" in ALL_LEVELS else "")
    assert bool(calls) == (asks and "amx" in ALL_LEVELS)


@pytest.mark.parametrize("level", levels.known())
def test_a_level_can_be_asked_for(small: Small, level: str) -> None:
    result = find(small, level, level)
    assert result.library is not None
    assert result.library.level == level


def test_turned_off_is_no_trouble(small: Small) -> None:
    why = "HEADWAY_NATIVE=0 turns the native kernels off; unset it to use them"
    assert find(small, "0") == loader.Found(None, why)


def test_a_level_that_is_not_to_be_had_is_an_error(small: Small, tmp_path: Path) -> None:
    with pytest.raises(
        BackendError, match=r"HEADWAY_NATIVE=portabel is not a level \(did you mean \"portable\"\?\)"
    ):
        find(small, "portabel")
    if LOWER:
        with pytest.raises(
            BackendError,
            match=r"HEADWAY_NATIVE=avx2 cannot run on this CPU, which lacks .*fma.*; .*use portable",
        ):
            find(small, "avx2", "portable")
    with pytest.raises(BackendError, match=f"{BEST} was not built in {tmp_path}; .*headway.native.build"):
        find(Small(tmp_path, small.sources), BEST)
    copied = small.copy(tmp_path)
    outdate(copied, BEST)
    with pytest.raises(BackendError, match=f"HEADWAY_NATIVE={BEST} is not available: .* is stale"):
        find(copied, BEST)


def test_a_stale_library_is_not_used(small: Small, tmp_path: Path) -> None:
    copied = small.copy(tmp_path)
    with (copied.sources / "measure.cpp").open("a") as file:
        file.write("// another\n")
    result = find(copied)
    assert result.library is None
    assert result.trouble == f"headway runs without its native kernels: {result.why}"
    assert result.why is not None
    assert f"{build.file_name(BEST)} is stale (built from sources" in result.why
    assert "build them: python -m headway.native.build" in result.why
    for level in LOWER:
        assert level in result.why.split("are unusable too")[0]


@pytest.mark.skipif(not LOWER, reason="this architecture has one level")
@pytest.mark.parametrize("damage", ["stale", "missing", "cut"])
@pytest.mark.parametrize("level", levels.known()[:-1])
def test_the_next_level_takes_over_from_one_that_is_unusable(
    small: Small, tmp_path: Path, damage: str, level: str
) -> None:
    copied = small.copy(tmp_path)
    path = copied.folder / build.file_name(level)
    words = {
        "stale": "is stale",
        "missing": f"{level} was not built",
        "cut": "cannot be opened",
    }
    if damage == "stale":
        outdate(copied, level)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(f"headway-source-hash:{build.source_hash(level, copied.sources)}\0".encode())
    result = loader.find(copied.folder, "", levels.NEEDS[level], copied.sources)
    runnable = [x for x in levels.runnable(levels.NEEDS[level], tiles=True) if x != level]
    assert result.library is not None
    assert result.library.level == runnable[0]
    assert result.trouble is not None
    assert result.trouble.startswith(f"headway runs its native kernels at level {runnable[0]} only: ")
    assert words[damage] in result.trouble


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
    result = find(Small(tmp_path, small.sources))
    monkeypatch.setattr(loader, "search", lambda: result)
    loader._announce.cache_clear()
    assert loader.why_missing() == result.why
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
