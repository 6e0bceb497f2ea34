"""Libraries of the CPU levels: built from exactly their sources, replaced at once, and left out with a message."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import BuildError
from headway.native import build, levels
from tests.native.conftest import Small

quiet = {"say": lambda _: None}


def program(path: Path, script: str) -> str:
    """Writes a compiler of our own: a shell script that ends by calling the real one."""
    path.write_text("#!/bin/sh\n" + script + f'\nexec {build.compiler()[0]} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_every_level_carries_the_hash_of_its_sources(small: Small) -> None:
    hashes = {level: build.built_hash(small.folder / build.file_name(level)) for level in levels.known()}
    assert hashes == {level: build.source_hash(level, small.sources) for level in levels.known()}
    assert len(set(hashes.values())) == len(hashes)


@pytest.mark.skipif(sys.platform != "linux", reason="nm -D is for ELF")
def test_a_library_exports_the_c_interface_and_nothing_else(small: Small) -> None:
    for level in levels.known():
        command = ["nm", "-D", "--defined-only", str(small.folder / build.file_name(level))]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert lines
        assert all(line.split()[-1].startswith("headway_") for line in lines)


def test_the_hash_changes_with_any_source_and_any_flag(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sources = (copied := small.copy(tmp_path)).folder, copied.sources
    hashes = {build.source_hash("portable", sources)}
    for change in (
        lambda: (sources / "headway.h").write_text((sources / "headway.h").read_text() + "\n"),
        lambda: (sources / "more.cpp").write_text(""),
        lambda: (sources / "more.cpp").rename(sources / "other.cpp"),
        lambda: monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g")),
    ):
        change()
        new_hash = build.source_hash("portable", sources)
        assert new_hash not in hashes
        hashes.add(new_hash)


def test_what_is_up_to_date_is_left_alone(small: Small, tmp_path: Path) -> None:
    copied = small.copy(tmp_path)
    path = copied.folder / build.file_name("portable")
    inode = path.stat().st_ino
    options = {"only": ["portable"], "sources": copied.sources, "force": False, **quiet}
    assert build.build(copied.folder, **options) == [path]
    assert path.stat().st_ino == inode
    with (copied.sources / "measure.cpp").open("a") as file:
        file.write("// another\n")
    assert build.build(copied.folder, **options) == [path]
    assert path.stat().st_ino != inode
    assert build.built_hash(path) == build.source_hash("portable", copied.sources)


def test_levels_share_the_sources_that_multiply_no_bytes() -> None:
    """Sources that multiply bytes, or that say which level a library is, are compiled for each level."""

    def included(name: str, known: set[str]) -> set[str]:
        if name not in known:
            known.add(name)
            for header in re.findall(r'#include "(\S+)"', (build.SOURCES / name).read_text()):
                included(header, known)
        return known

    sources = {unit.name: included(unit.name, set()) for unit in build.SOURCES.glob("*.cpp")}
    different = {name for name, files in sources.items() if {"rounded.h", "measure.cpp"} & files}
    assert different == set(levels.OWN) < set(sources)
    for level, base in levels.STANDS_ON.items():
        assert levels.NEEDS[base] < levels.NEEDS[level]
        assert not {base, level} & {x for x in levels.STANDS_ON if x != level}


def test_sources_that_change_meanwhile_leave_a_stale_library(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = small.copy(tmp_path)
    edit = f"""case "$*" in *measure.cpp*) echo "// meanwhile" >> {copied.sources}/measure.cpp;; esac"""
    monkeypatch.setenv("CXX", program(tmp_path / "c++", edit))
    (path,) = build.build(copied.folder, ["portable"], sources=copied.sources, **quiet)
    assert build.built_hash(path) not in (None, build.source_hash("portable", copied.sources))


def test_sources_that_do_not_compile_leave_the_old_library(small: Small, tmp_path: Path) -> None:
    copied = small.copy(tmp_path)
    contents = {path: path.read_bytes() for path in copied.folder.iterdir()}
    (copied.sources / "wrong.cpp").write_text("int f() { return unheard_of; }")
    with pytest.raises(BuildError, match=r"(?s)do not compile.*wrong\.cpp.*last lines:.*unheard_of"):
        build.build(copied.folder, ["portable"], sources=copied.sources, **quiet)
    assert {path: path.read_bytes() for path in copied.folder.iterdir()} == contents


def test_without_a_compiler_it_says_which_were_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"none of g\+\+, clang\+\+, c\+\+ is in PATH; install one"):
        build.compiler()
    monkeypatch.setenv("CXX", "/nonexistent -pipe")
    with pytest.raises(BuildError, match="CXX=/nonexistent -pipe names no program; correct or unset it"):
        build.compiler()


def test_the_compiler_may_come_with_arguments(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{build.compiler()[0]} -pipe")
    assert build.compiler()[1:] == ["-pipe"]


@pytest.mark.skipif("avx2" not in levels.known(), reason="this architecture has one level")
def test_levels_that_the_compiler_is_too_old_for_are_left_out(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$*" in *-mavx512*) echo "no such option -mavx512" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", program(tmp_path / "c++", script))
    messages: list[str] = []
    built = build.build(tmp_path / "lib", sources=small.sources, say=messages.append)
    known = ("avxvnni", "avx2", "portable")
    assert built == [tmp_path / "lib" / build.file_name(level) for level in known]
    assert [line.split(",")[0] for line in messages[:4]] == [
        f"level {level} is left out" for level in ("amx", "avx512bf16", "avx512vnni", "avx512")
    ]
    assert "too old for it: no such option -mavx512" in messages[0]
    with pytest.raises(BuildError, match="no such option -mavx512"):
        build.build(tmp_path / "lib", ["avx512"], sources=small.sources, **quiet)


@pytest.mark.skipif("avx2" not in levels.known(), reason="this architecture has one level")
def test_the_best_level_that_the_compiler_knows_is_built_and_kept(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    script = f'case "$*" in *-mavx512bf16*) exit 1;; *) echo "$*" >> {log};; esac'
    monkeypatch.setenv("CXX", program(tmp_path / "c++", script))
    for compiles in (True, False):  # the second time nothing is compiled
        log.write_text("")
        built = build.build(
            tmp_path / "lib", levels.known(), best=True, force=False, sources=small.sources, **quiet
        )
        assert built == [tmp_path / "lib" / build.file_name("avx512vnni")]
        assert [*(tmp_path / "lib").iterdir()] == built
        assert ("-c" in log.read_text().split()) is compiles


def test_an_installation_compiles_this_machines_level_unless_others_are_asked_for() -> None:
    assert build.asked_levels({}) == build.asked_levels({"HEADWAY_LEVELS": "native"})
    assert build.asked_levels({}) == (levels.of_this_machine(), True)
    assert build.asked_levels({"HEADWAY_LEVELS": "all"}) == ([*levels.known()], False)
    assert build.asked_levels({"HEADWAY_LEVELS": "avx2,portable"}) == (["avx2", "portable"], False)
    with pytest.raises(BuildError, match="has no level 'best'"):
        build.build(only=build.asked_levels({"HEADWAY_LEVELS": "best"})[0])


def test_each_architecture_has_its_own_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert levels.known() == levels.known("arm64") == ("i8mm", "dotprod", "neon", "portable")
    assert levels.known("riscv64") == ("portable",)
    with pytest.raises(
        BuildError, match="aarch64 has no level 'avx2'; there are i8mm, dotprod, neon, portable"
    ):
        build.build(only=["avx2"])
    with pytest.raises(BuildError, match="riscv64 has no level 'neon'; there are portable"):
        build.build(only=["neon"], machine="riscv64")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    assert levels.known() == levels.known("AMD64")
    assert {*levels.known(), *levels.known("aarch64")} == {*levels.LEVELS}
    assert {*levels.known()} & {*levels.known("aarch64")} == {"portable"}
    with pytest.raises(BuildError, match=r"no level 'avx521' \(did you mean \"avx512\"\?\)"):
        build.build(only=["avx521"])


@pytest.mark.parametrize(("asked", "code"), [("", 1), ("require", 1), ("auto", 0), ("off", 0), ("on", 1)])
def test_a_build_that_is_not_required_may_fail(
    asked: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HEADWAY_BUILD", asked)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build.main(["--out", str(tmp_path)]) == code
    captured = capsys.readouterr()
    words = {"on": "HEADWAY_BUILD must be one of", "off": "nothing built"}.get(asked, "no C++ compiler")
    assert words in captured.err
    assert not captured.out
    assert not list(tmp_path.iterdir())


def test_building_imports_nothing_heavy() -> None:
    script = "import sys, headway.native.build; print(*{n.split('.')[0] for n in sys.modules})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "typer"} & set(result.stdout.split())


@pytest.mark.parametrize(
    ("system", "name", "openmp"),
    [
        ("linux", "libheadway_portable.so", "-fPIC -fopenmp"),
        ("darwin", "libheadway_portable.dylib", "-fPIC -Xclang -fopenmp"),
        ("win32", "libheadway_portable.dll", "-fopenmp=libiomp5"),
    ],
)
def test_each_system_has_its_names_and_its_openmp(system: str, name: str, openmp: str) -> None:
    script = (
        f"import sys; sys.platform = {system!r}; from headway.native import build as b; "
        "print(b.file_name('portable'), *b.FLAGS)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"{name} -O3 -std=c++17 {openmp} -fno-exceptions ")


OUTSIDE = """
import ctypes, sys
from pathlib import Path
import torch
from headway.native import loader
folder, sources = map(Path, sys.argv[1:])
held = torch.ones(1000)
dll = loader.open_library(folder, "portable", sources).dll
dll.headway_read(held.data_ptr(), held.nbytes + 4000, 1, ctypes.c_uint64())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is for ELF")
def test_a_sanitized_library_stops_at_a_read_outside_its_memory(small: Small, tmp_path: Path) -> None:
    build.build(tmp_path, ["portable"], sources=small.sources, sanitize=True, **quiet)
    asan = subprocess.run(
        [*build.compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    result = subprocess.run(
        [sys.executable, "-c", OUTSIDE, str(tmp_path), str(small.sources)],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert result.returncode
    assert "AddressSanitizer" in result.stderr
    assert "headway_read" in result.stderr
