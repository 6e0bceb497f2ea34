"""The two distributions: their files, metadata and commands, and that they have one version."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from headway.cli import GROUP, LABORATORY, Command, overview, run

ROOT = Path(__file__).parents[1]
LAB = ROOT / "packages" / "lab"
POINTS = tomllib.loads((LAB / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tree(folder: Path) -> None:
    """Copies the files of both distributions."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for name in ("src", "recipes", "packages"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "lib"))


def built(project: Path, out: Path) -> tuple[set[str], str, dict[str, str]]:
    """Builds the wheel of a project; returns its files, its metadata, and its commands."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    environment = {**os.environ, "HEADWAY_BUILD": "off"}
    subprocess.run(command, cwd=project, check=True, capture_output=True, env=environment)
    (wheel,) = out.glob("*.whl")
    declared = ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        about = {name.split("/", 1)[1]: name for name in archive.namelist() if ".dist-info/" in name}
        declared.read_string(archive.read(about["entry_points.txt"]).decode())
        assert archive.read(about["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
        metadata = archive.read(about["METADATA"]).decode()
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    return files, metadata, dict(declared[GROUP]) if GROUP in declared else {}


@pytest.mark.slow
def test_each_distribution_carries_its_package_and_nothing_else(tmp_path: Path) -> None:
    tree(tmp_path)
    sources = tmp_path / "src"  # listed before the build, which may leave bytecode there
    source_files = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    shipped = {f"headway/recipes/shipped/{path.name}" for path in (ROOT / "recipes").iterdir()}
    files, metadata, commands = built(tmp_path, tmp_path / "dist")
    assert files == shipped | {name for name in source_files if name.startswith("headway/")}
    assert {"headway/py.typed", "headway/native/csrc/headway.h", "headway/serve/page/index.html"} <= files
    assert not commands
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert "torch" in needed
    assert "matplotlib" not in needed
    files, metadata, commands = built(tmp_path / "packages" / "lab", tmp_path / "lab")
    assert files == {name for name in source_files if name.startswith("headway_lab/")}
    assert "headway_lab/py.typed" in files
    assert commands == POINTS
    assert f"\nVersion: {PROJECT['version']}\n" in metadata
    assert f"\nRequires-Dist: headway=={PROJECT['version']}\n" in metadata
    assert "\nRequires-Dist: matplotlib>=" in metadata


def test_the_installed_commands_are_those_that_the_laboratory_declares() -> None:
    """If this fails, `make install` renews a stale installation."""
    assert tuple(sorted(POINTS)) == tuple(sorted(LABORATORY))
    installed = [
        point for point in entry_points(group=GROUP) if point.dist and point.dist.name == "headway-lab"
    ]
    assert {point.name: point.value for point in installed} == POINTS
    assert all(isinstance(point.load(), Command) for point in installed)
    assert version("headway") == version("headway-lab") == PROJECT["version"]


def test_the_command_line_does_not_name_the_laboratory() -> None:
    for path in (ROOT / "src" / "headway").rglob("*.py"):
        assert "headway_lab" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("name", LABORATORY)
def test_without_the_laboratory_its_commands_say_which_package_has_them(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headway.cli.entry_points", lambda group: ())
    assert run([name]) == 2
    message = (
        f'there is no command {name!r} here, which is in the package headway-lab; pip install "headway[lab]"'
    )
    assert message in capsys.readouterr().err
    assert "headway demo" not in overview()
    assert "start here:  headway show " in overview()


def test_the_version_and_what_is_said_of_it_agree() -> None:
    """The changelog begins with this version, released or not, and CITATION.cff has its number."""
    released = PROJECT["version"].partition(".dev")[0]
    (first, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == released
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
