"""Files, classes and functions named in docs/architecture.md exist; docs/api.md is up to date with the docstrings."""

import ast
import re
from pathlib import Path

import pytest

from tests import public_names

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "architecture.md").read_text()
SOURCES = TESTS.parent / "src" / "headway"
PLACES = sorted(set(re.findall(r"`([\w/]+(?:\.py|\.cpp|/))(?::(\w+))?`", TEXT)))


def top_level(path: Path) -> set[str]:
    """Returns the names that a module defines at its top level."""
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
    in_tests = Path(file).name.startswith("test_") or file == "cache/paged.py"
    root = TESTS.parent if file.startswith("tests/") else TESTS if in_tests else SOURCES
    assert (root / file).exists()
    assert not name or name in top_level(root / file)


def test_the_page_of_public_names_is_as_it_would_be_written_now() -> None:
    assert public_names.PAGE.read_text() == public_names.page(), "run python -m tests.public_names"
