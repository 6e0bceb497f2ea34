"""docs/architecture.md names files, classes and functions that are there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "architecture.md").read_text()
SOURCES = TESTS.parent / "src" / "headway"
PLACES = sorted(set(re.findall(r"`([\w/]+(?:\.py|\.cpp|/))(?::(\w+))?`", TEXT)))


def top_level(path: Path) -> set[str]:
    """The names that a module defines."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_there_are_places() -> None:
    assert len(PLACES) > 40


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_what_is_named_is_there(file: str, name: str) -> None:
    root = TESTS if Path(file).name.startswith(("test_", "paged")) else SOURCES
    assert (root / file).exists()
    assert not name or name in top_level(root / file)
