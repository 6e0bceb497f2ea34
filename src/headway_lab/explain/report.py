"""Reports: the answers of runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import Any

from headway.language import Translation
from headway.report import cell, padded, plain, table, width
from headway_lab.explain.tables import translation

Row = Mapping[str, Any]  # cells by the name of their column, with units in parentheses
Rows = Sequence[Row]
Claim = str | tuple[str, str]

TOO_SMALL = "too small to tell"
VERDICTS = {
    **{
        word: f"{word} at this size ({{setting}}): {{finding}}."
        for word in ("seen", "seen in part", "not seen")
    },
    TOO_SMALL: "too small to tell ({setting}): {finding}.",
}
LACKS = {"not seen": " Not seen: {claims}.", TOO_SMALL: " Too small to tell: {claims}."}
FEWER = "({shown} of {rows} rows; all of them with --out or --json)"


@dataclass(frozen=True)
class Table:
    """Cells of a table of text, whose names are translated when it is shown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def text(self, say: Translation) -> str:
        """Aligned for a terminal; numbers as `headway.report.cell` has them."""
        rows = [[say(cell(x)) if isinstance(x, str | bool) else x for x in row] for row in self.rows]
        return table([say(name) for name in self.columns], rows)


@dataclass(frozen=True, kw_only=True)
class Report:
    """An answer by a run. The report of `run` is without sentences, and has its claims by key, or by the key and a name
    that the sentence is about; `Topic.told` puts sentences in the place of keys and values.

    topic      name in TOPICS, question one sentence, formula what is verified, as text
    rows       the numbers: a table whose columns are the names in all rows
    claims     sentences, and whether the numbers of this run show them; None where the run is too small to tell
    setting    sizes and seeds of the run: "d = 4..512, 3 seeds"
    finding    what was found, with numbers, in one or two sentences
    values     the values that its sentences use
    highlight  rows that a terminal shows (by index); empty = all of them
    picture    text that belongs to the answer (a pattern drawn, for example), or a table
    figure     where the figure was written, csv where the table was; None when nothing was written
    language   of its sentences; names of columns and of contenders are English, and shown in it
    """

    topic: str = ""
    question: str = ""
    formula: str = ""
    rows: tuple[Row, ...]
    claims: Mapping[Claim, bool | None]
    setting: str = ""
    finding: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    highlight: tuple[int, ...] = ()
    picture: str | Table = ""
    figure: Path | None = None
    csv: Path | None = None
    language: str = "en"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the table's columns."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def cells(self) -> list[list[Any]]:
        """The table without its header; None where a row has no such column."""
        return [[row.get(name) for name in self.columns] for row in self.rows]

    @property
    def seen(self) -> bool:
        """Whether the run shows every claim."""
        return word_of(self.claims.values()) == "seen"

    @property
    def verdict(self) -> str:
        """`word_of` the claims, at this size and with these seeds; a run of this size refutes nothing."""
        word, without, fill = word_of(self.claims.values()), "", translation(self.language).fill
        for kind, sentence in LACKS.items() if word == "seen in part" else ():
            if missing := [claim for claim, seen in self.claims.items() if word_of([seen]) == kind]:
                without += fill(sentence, claims=fill("; ").join(map(str, missing)))
        return fill(VERDICTS[word], setting=self.setting, finding=self.finding) + without

    def column(self, name: str) -> list[Any]:
        """The values of one column, of the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def to_text(self) -> str:
        """The report for a terminal."""
        say = translation(self.language)
        shown = [self.cells[i] for i in self.highlight] or self.cells
        numbers = Table(self.columns, shown).text(say)
        parts = [f"{self.topic}: {self.question}", indent(self.formula, "  "), numbers]
        if len(shown) < len(self.rows):
            parts[-1] += f"\n  {say.fill(FEWER, shown=len(shown), rows=len(self.rows))}"
        if self.picture:
            parts.append(indent(str(self.picture), "  "))
        words = {claim: say(word_of([seen])) for claim, seen in self.claims.items()}
        widest = max(map(width, words.values()), default=0)
        parts.append("\n".join(f"  {padded(word, widest)}  {claim}" for claim, word in words.items()))
        parts.append(say.fill("verdict: {verdict}", verdict=self.verdict))
        if written := [str(path) for path in (self.figure, self.csv) if path]:
            parts.append(say.fill("written: {files}", files=", ".join(written)))
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types, `seen` and `verdict` included."""
        facts = plain(self)
        del facts["values"]
        first = {name: facts[name] for name in ("topic", "question", "formula")}
        return {
            **first,
            "columns": self.columns,
            **facts,
            "rows": plain(self.cells),
            "seen": self.seen,
            "verdict": self.verdict,
        }


def word_of(claims: Iterable[bool | None]) -> str:
    """The word for claims: seen, seen in part, not seen, or too small to tell, where none is seen or refuted."""
    known = [*claims]
    if all(known):
        return "seen"
    return "seen in part" if any(known) else "not seen" if False in known else TOO_SMALL


def by_seed(row: Row) -> list[float]:
    """A row's results, seed by seed."""
    return [value for name, value in row.items() if name.startswith("seed ")]


def ranged(name: str, values: Sequence[float], middle: Callable[[Sequence[float]], float] = median) -> Row:
    """The columns of a repeated measurement: its middle, "NAME, least" and "NAME, most"."""
    return {name: middle(values), f"{name}, least": min(values), f"{name}, most": max(values)}
