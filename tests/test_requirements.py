"""docs/requirements.md is true: every row is there once, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = {
    int(number): shown
    for number, shown in re.findall(
        r"^\| (\d+) \|.*\| ([^|]*) \|$", (TESTS.parent / "docs" / "requirements.md").read_text(), re.MULTILINE
    )
}
NUMBERED = re.compile(r"rows?_(\d+)")


@cache
def names(path: Path) -> set[str]:
    """The test functions of a file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once() -> None:
    text = (TESTS.parent / "docs" / "requirements.md").read_text()
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == list(range(1, 116))
    assert list(ROWS) == list(range(1, 116))


@pytest.mark.parametrize("row", ROWS)
def test_what_shows_a_row_exists(row: int) -> None:
    shown = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", ROWS[row])
    assert shown or ROWS[row] == "missing"
    for file, name in shown:
        assert (TESTS / file).exists(), file
        assert not name or name in names(TESTS / file), f"{file}::{name}"


def test_numbers_in_the_names_of_tests_are_rows_that_are_not_missing() -> None:
    found = {
        (int(number), f"{path.relative_to(TESTS)}::{name}")
        for path in TESTS.rglob("test_*.py")
        for name in names(path)
        if name.startswith("test_")
        for number in NUMBERED.findall(name)
    }
    assert found
    assert [name for number, name in found if ROWS.get(number, "missing") == "missing"] == []
