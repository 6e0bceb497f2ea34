"""What is installed: both packages with their types and sources, and the commands of each."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from headway.cli import GROUP, Command

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_carries_both_packages(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    sources = tmp_path / "src"  # before the build, which may leave bytecode beside them
    given = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(
        build, cwd=tmp_path, check=True, capture_output=True, env={**os.environ, "HEADWAY_BUILD": "off"}
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        declared = ConfigParser()
        declared.read_string(archive.read(points).decode())
    assert files == given
    assert {"headway/py.typed", "headway_lab/py.typed", "headway/native/csrc/headway.h"} <= files
    assert set(declared[GROUP]) == {"bench", "demo", "explain"}


def test_the_installed_commands_are_those_that_the_project_declares() -> None:
    """A stale install is renewed by `make install`."""
    declared = re.search(
        rf'\[project.entry-points."{GROUP}"\]\n((?:\w+ = .*\n)+)', (ROOT / "pyproject.toml").read_text()
    )
    assert declared
    installed = [point for point in entry_points(group=GROUP) if point.dist and point.dist.name == "headway"]
    assert {f'{point.name} = "{point.value}"' for point in installed} == set(declared[1].splitlines())
    assert all(isinstance(point.load(), Command) for point in installed)


def test_the_command_line_does_not_name_the_laboratory() -> None:
    for path in (ROOT / "src" / "headway").rglob("*.py"):
        assert "headway_lab" not in path.read_text(encoding="utf-8"), path
