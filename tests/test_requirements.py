"""docs/requirements.md is up to date with its tables, and the tests, commands and files that it names exist."""

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import requirements
from tests.command_lines import ROOT, read_command

TESTS = Path(__file__).parent
ROWS = {row.number: row for row in requirements.rows()}
SLIPS = {slip.name: slip for slip in requirements.slips()}
NAMED = sorted({test for some in (*ROWS.values(), *SLIPS.values()) for test in some.tests})
NUMBERED = re.compile(r"rows?_(\d+)")


@cache
def names(path: Path) -> set[str]:
    """Returns the names of a file's functions."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_page_is_what_its_tables_say() -> None:
    assert requirements.PAGE.read_text(encoding="utf-8") == requirements.page(), (
        "python -m tests.requirements writes the page anew"
    )


def test_every_row_and_every_slip_is_there_once() -> None:
    assert [row.number for row in requirements.rows()] == list(range(1, 122))
    assert list(SLIPS) == [f"E{number}" for number in range(1, 21)]


@pytest.mark.parametrize("test", NAMED)
def test_a_named_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert (TESTS / file).name.startswith("test_")
    assert not name or (name.startswith("test_") and name in names(TESTS / file)), test


@pytest.mark.slow
def test_named_tests_are_collected() -> None:
    files = sorted({f"tests/{test.partition('::')[0]}" for test in NAMED})
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--slow", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    collected = {line.partition("[")[0].removeprefix("tests/") for line in process.stdout.splitlines()}
    collected |= {line.partition("::")[0] for line in collected}
    assert [test for test in NAMED if test not in collected] == []


@pytest.mark.parametrize("row", ROWS)
def test_a_command_of_a_row_is_read(row: int) -> None:
    line = ROWS[row].shown_by
    if ROWS[row].command:
        read_command(line)
    else:
        assert shlex.split(line) == ["python", "-m", "pytest", f"tests/{ROWS[row].tests[0]}"]


@pytest.mark.parametrize("slip", SLIPS)
def test_what_a_slip_points_at_is_there(slip: str) -> None:
    record = SLIPS[slip]
    assert record.tests
    assert (ROOT / record.where).is_file()
    assert (ROOT / "docs" / "documents" / f"{record.page}.en.md").is_file()


def test_a_row_says_what_it_lacks() -> None:
    row = requirements.Row(section="A", number=1, holds="a | b", tests=("x.py::test_y",))
    assert (row.status, row.shown_by) == ("shown", "python -m pytest tests/x.py::test_y")
    assert requirements.Row(section="A", number=1, holds="", tests=()).status == "missing"
    assert requirements.Row(section="A", number=1, holds="", tests=("x",), lacks="y").status == "in part: y"


def test_numbers_in_the_names_of_tests_are_rows_that_are_not_missing() -> None:
    numbered = {
        (int(number), f"{path.relative_to(TESTS)}::{name}")
        for path in TESTS.rglob("test_*.py")
        for name in names(path)
        if name.startswith("test_")
        for number in NUMBERED.findall(name)
    }
    assert numbered
    assert [name for number, name in numbered if number not in ROWS or not ROWS[number].tests] == []
