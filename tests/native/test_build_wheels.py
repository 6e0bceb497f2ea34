"""Wheels and editable installs: which libraries they take with them, and what is said where there are none."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headway.native import build, levels
from tests.native.conftest import Small

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(small: Small, tmp_path: Path) -> Path:
    """The project with the small sources alone."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    away = shutil.ignore_patterns("csrc", "lib", "__pycache__")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=away)
    shutil.copytree(small.sources, tmp_path / "src/headway/native/csrc")
    return tmp_path


def wheel(project: Path, **environment: str) -> tuple[str, set[str], str]:
    """Builds a wheel; its name, the native files in it, and what was said (with the exit code's name "" if 1)."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"],
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode:
        return "", set(), done.stderr
    (path,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = {name.removeprefix("headway/native/") for name in archive.namelist() if "/native/" in name}
    return path.name, names, done.stdout + done.stderr


@pytest.mark.slow
def test_a_wheel_takes_its_libraries_and_their_sources_with_it(project: Path) -> None:
    (project / "src/headway/native/lib").mkdir()
    (project / "src/headway/native/lib/libheadway_old.so").touch()
    name, files, _ = wheel(project, HEADWAY_BUILD="require", HEADWAY_LEVELS="all")
    assert name.startswith("headway-")
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")
    assert {file for file in files if file.startswith("lib/")} == {
        f"lib/{build.file_name(level)}" for level in levels.known()
    }
    assert {"csrc/measure.cpp", "csrc/headway.h", "build.py"} <= files


@pytest.mark.slow
def test_libraries_that_are_kept_are_taken_and_a_wheel_is_of_the_machine_that_it_is_for(
    project: Path, tmp_path: Path
) -> None:
    asked = {"HEADWAY_BUILD": "require", "HEADWAY_LEVELS": "portable", "HEADWAY_KEEP": str(tmp_path / "kept")}
    name, files, _ = wheel(project, **asked)
    kept = tmp_path / "kept" / build.file_name("portable")
    written = kept.stat().st_ino
    assert f"lib/{kept.name}" in files
    shutil.rmtree(project / "dist")
    again, files, said = wheel(project, **asked, HEADWAY_MACHINE="riscv64", CXX="/nonexistent")
    assert f"lib/{kept.name}" in files
    assert kept.stat().st_ino == written
    assert "at a time" not in said
    if sys.platform == "linux":
        assert again == name.replace(build.platform.machine(), "riscv64")


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure_unless_libraries_are_required(project: Path) -> None:
    nowhere = {"CXX": "/nonexistent"}
    name, files, said = wheel(project, HEADWAY_BUILD="auto", **nowhere)
    assert name.endswith("-py3-none-any.whl")
    assert not any(file.startswith("lib/") for file in files)
    assert "installed without its native kernels: no C++ compiler: CXX=/nonexistent" in said
    name, _, said = wheel(project, HEADWAY_BUILD="require", **nowhere)
    assert not name
    assert "no C++ compiler: CXX=/nonexistent" in said
    shutil.rmtree(project / "dist")
    name, files, _ = wheel(project, HEADWAY_BUILD="off")
    assert name.endswith("-py3-none-any.whl")
    assert not any(file.startswith("lib/") for file in files)


@pytest.mark.slow
def test_an_editable_install_keeps_its_libraries_beside_the_sources(project: Path) -> None:
    script = "from hatchling.build import build_editable; build_editable('dist')"
    environment = {**os.environ, "HEADWAY_BUILD": "require"}
    subprocess.run(
        [sys.executable, "-c", script], cwd=project, check=True, capture_output=True, env=environment
    )
    package = project / "src/headway/native"
    level = levels.of_this_machine()[0]
    library = package / "lib" / build.file_name(level)
    assert [*library.parent.iterdir()] == [library]
    assert build.built_hash(library) == build.source_hash(level, package / "csrc")
    (path,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
