"""Writes docs/requirements.md from the tables of rows and slips beside this file: `python -m tests.requirements`."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "requirements.md"
INTRODUCTION = """# Requirements

What headway must do, taken from five texts on Transformers: multi-head attention with masks and caches; the
Transformer of 2017; LLaMA, Alpaca, Vicuna; rotary embedding and RoFormer; Longformer and grouped queries.
[documents](documents/README.md) follows these texts one by one. Each row names the tests below `tests/` that check
it, and a command that shows it to a reader. A number in a test's name (`test_row_57_...`) is the number of a row. "in
part" says what the tests do not cover; "missing" means that nothing shows a row yet. `python -m tests.requirements`
writes this page from `tests/requirements.toml` and `tests/slips.toml`; `tests/test_requirements.py` checks every name
on it.
"""
SLIPS = """## Slips of the documents

Errors in the documents. headway does what is right; the two pages of the document and the file named here say so.

| slip | what is said | what is right | where | shown by |
|---|---|---|---|---|"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A requirement. `lacks` says what its tests leave out; if there is no `command`, the first test is run."""

    section: str
    number: int
    holds: str
    tests: tuple[str, ...]
    lacks: str = ""
    command: str = ""

    @property
    def status(self) -> str:
        """One of: shown, in part (with what is lacking), missing."""
        if not self.tests:
            return "missing"
        return f"in part: {self.lacks}" if self.lacks else "shown"

    @property
    def shown_by(self) -> str:
        """The command that shows it to a reader."""
        return self.command or f"python -m pytest tests/{self.tests[0]}"


@dataclass(frozen=True, kw_only=True)
class Slip:
    """An error of a document, and what is right. `page` names its pages below docs/documents, `where` a file."""

    name: str
    page: str
    says: str
    right: str
    where: str
    tests: tuple[str, ...]


def rows() -> Iterator[Row]:
    """Yields all rows, by section."""
    for section, table in tomllib.loads((TESTS / "requirements.toml").read_text(encoding="utf-8")).items():
        for number, row in table.items():
            yield Row(section=section, number=int(number), **{**row, "tests": tuple(row["tests"])})


def slips() -> Iterator[Slip]:
    """Yields all slips."""
    for name, slip in tomllib.loads((TESTS / "slips.toml").read_text(encoding="utf-8")).items():
        yield Slip(name=name, **{**slip, "tests": tuple(slip["tests"])})


def cell(text: str) -> str:
    """Escapes a text for a cell of a table."""
    return text.replace("|", "\\|")


def page() -> str:
    """Returns the whole page."""
    all_rows = list(rows())
    counts = [
        sum(row.status.startswith(word) for row in all_rows) for word in ("shown", "in part", "missing")
    ]
    parts = [
        INTRODUCTION,
        "Of {} rows {} are shown, {} in part, {} missing.\n".format(len(all_rows), *counts),
    ]
    for section in dict.fromkeys(row.section for row in all_rows):
        lines = [
            f"## {section}",
            "",
            "| # | what must hold | status | tests | command |",
            "|---|---|---|---|---|",
        ]
        for row in all_rows:
            if row.section == section:
                tests = "<br>".join(f"`{test}`" for test in row.tests)
                lines.append(
                    f"| {row.number} | {cell(row.holds)} | {cell(row.status)} | {tests} | `{cell(row.shown_by)}` |"
                )
        parts.append("\n".join([*lines, ""]))
    lines = [SLIPS]
    for slip in slips():
        tests = "<br>".join(f"`{test}`" for test in slip.tests)
        pages = f"[en](documents/{slip.page}.en.md), [zh](documents/{slip.page}.zh.md), `{slip.where}`"
        lines.append(f"| {slip.name} | {cell(slip.says)} | {cell(slip.right)} | {pages} | {tests} |")
    return "\n".join([*parts, "\n".join(lines), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
