"""What a run answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from headway.report import plain, table

Row = Mapping[str, Any]  # cells by the name of their column, with units in parentheses


@dataclass(frozen=True, kw_only=True)
class Report:
    """An answer by a run.

    topic      name in TOPICS, question one sentence, formula what is verified, as text; `explain` fills them in
    rows       the numbers: a table whose columns are the names in all rows
    seen       whether the run shows what the formula says
    setting    sizes and seeds of the run: "d = 4..512, 3 seeds"
    finding    what was found, with numbers, in one or two sentences
    highlight  rows that a terminal shows (by index); empty = all of them
    picture    text that belongs to the answer (a pattern drawn, for example)
    figure     where the figure was written, csv where the table was; None when nothing was written
    """

    topic: str = ""
    question: str = ""
    formula: str = ""
    rows: tuple[Row, ...]
    seen: bool
    setting: str
    finding: str
    highlight: tuple[int, ...] = ()
    picture: str = ""
    figure: Path | None = None
    csv: Path | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the table's columns."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def cells(self) -> list[list[Any]]:
        """The table without its header; None where a row has no such column."""
        return [[row.get(name) for name in self.columns] for row in self.rows]

    @property
    def verdict(self) -> str:
        """ "seen" or "not seen" at this size, with these seeds; a run of this size refutes nothing."""
        return f"{'seen' if self.seen else 'not seen'} at this size ({self.setting}): {self.finding}"

    def column(self, name: str) -> list[Any]:
        """The values of one column, of the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def to_text(self) -> str:
        """The report for a terminal."""
        shown = [self.cells[i] for i in self.highlight] or self.cells
        parts = [f"{self.topic}: {self.question}", indent(self.formula, "  "), table(self.columns, shown)]
        if len(shown) < len(self.rows):
            parts[-1] += f"\n  ({len(shown)} of {len(self.rows)} rows; all of them with --out or --json)"
        if self.picture:
            parts.append(indent(self.picture, "  "))
        parts.append(f"verdict: {self.verdict}")
        written = [str(path) for path in (self.figure, self.csv) if path]
        if written:
            parts.append("written: " + ", ".join(written))
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types, `verdict` included."""
        facts = plain(self)
        first = {name: facts[name] for name in ("topic", "question", "formula")}
        return {**first, "columns": self.columns, **facts, "rows": plain(self.cells), "verdict": self.verdict}
