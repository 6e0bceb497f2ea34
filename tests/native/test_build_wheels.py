"""Wheels and editable installs: which libraries they contain, and what is reported if there are none."""

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
    """Copies the project, with only the small sources of the kernels."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    ignored = shutil.ignore_patterns("csrc", "lib", "__pycache__")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    shutil.copytree(small.sources, tmp_path / "src/headway/native/csrc")
    return tmp_path


def wheel(project: Path, **environment: str) -> tuple[str, set[str], str]:
    """Builds a wheel. Returns its name ("" if that fails), the native files in it, and the messages."""
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"],
        cwd=project,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if result.returncode:
        return "", set(), result.stderr
    (path,) = (project / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = {name.removeprefix("headway/native/") for name in archive.namelist() if "/native/" in name}
    return path.name, names, result.stdout + result.stderr


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
    environment = {
        "HEADWAY_BUILD": "require",
        "HEADWAY_LEVELS": "portable",
        "HEADWAY_KEEP": str(tmp_path / "kept"),
    }
    name, files, _ = wheel(project, **environment)
    library = tmp_path / "kept" / build.file_name("portable")
    inode = library.stat().st_ino
    assert f"lib/{library.name}" in files
    shutil.rmtree(project / "dist")
    other_name, files, messages = wheel(project, **environment, HEADWAY_MACHINE="riscv64", CXX="/nonexistent")
    assert f"lib/{library.name}" in files
    assert library.stat().st_ino == inode
    assert "at a time" not in messages
    if sys.platform == "linux":
        assert other_name == name.replace(build.platform.machine(), "riscv64")


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure_unless_libraries_are_required(project: Path) -> None:
    environment = {"CXX": "/nonexistent"}
    name, files, messages = wheel(project, HEADWAY_BUILD="auto", **environment)
    assert name.endswith("-py3-none-any.whl")
    assert not any(file.startswith("lib/") for file in files)
    assert "installed without its native kernels: no C++ compiler: CXX=/nonexistent" in messages
    name, _, messages = wheel(project, HEADWAY_BUILD="require", **environment)
    assert not name
    assert "no C++ compiler: CXX=/nonexistent" in messages
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
