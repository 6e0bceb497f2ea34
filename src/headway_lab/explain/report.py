"""Reports: the results of runs, as tables, claims and sentences."""

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
    """A table of text cells, whose words are translated when it is shown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def text(self, say: Translation) -> str:
        """Returns the table aligned for a terminal, with numbers formatted by `headway.report.cell`."""
        rows = [[say(cell(x)) if isinstance(x, str | bool) else x for x in row] for row in self.rows]
        return table([say(name) for name in self.columns], rows)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer of a run. The report that `run` returns is without sentences: its claims are keyed by a key, or by a
    key and the name that the sentence is about; `Topic.told` replaces keys and values by sentences.

    topic      name in TOPICS; question: one sentence; formula: what is verified, as text
    rows       the numbers: a table whose columns are the names in all rows
    claims     sentences, and whether the numbers of this run show them; None if the run is too small to tell
    setting    sizes and seeds of the run: "d = 4..512, 3 seeds"
    finding    what was found, with numbers, in one or two sentences
    values     the values that its sentences use
    highlight  indices of the rows that a terminal shows; empty = all of them
    picture    text that belongs to the answer (a drawn pattern, for example), or a table
    figure     path of the written figure; csv: path of the written table; None if nothing was written
    language   language of its sentences; names of columns and of contenders are English, and translated when shown
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
        """The table without its header; None if a row has no such column."""
        return [[row.get(name) for name in self.columns] for row in self.rows]

    @property
    def seen(self) -> bool:
        """Whether the run shows every claim."""
        return word_of(self.claims.values()) == "seen"

    @property
    def verdict(self) -> str:
        """The verdict as a sentence: `word_of` the claims, at this size and with these seeds; a run of this size
        refutes nothing."""
        word, lacking, fill = word_of(self.claims.values()), "", translation(self.language).fill
        for kind, sentence in LACKS.items() if word == "seen in part" else ():
            if missing := [claim for claim, seen in self.claims.items() if word_of([seen]) == kind]:
                lacking += fill(sentence, claims=fill("; ").join(map(str, missing)))
        return fill(VERDICTS[word], setting=self.setting, finding=self.finding) + lacking

    def column(self, name: str) -> list[Any]:
        """Returns the values of one column, of the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def to_text(self) -> str:
        """Returns the report for a terminal."""
        say = translation(self.language)
        shown_rows = [self.cells[i] for i in self.highlight] or self.cells
        numbers = Table(self.columns, shown_rows).text(say)
        parts = [f"{self.topic}: {self.question}", indent(self.formula, "  "), numbers]
        if len(shown_rows) < len(self.rows):
            parts[-1] += f"\n  {say.fill(FEWER, shown=len(shown_rows), rows=len(self.rows))}"
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
        """Returns the report in JSON's types, including `seen` and `verdict`."""
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
    """Returns the word for a set of claims: "seen" if all are, "seen in part" if some are, "not seen" if none is and at
    least one is refuted, else "too small to tell"."""
    known = [*claims]
    if all(known):
        return "seen"
    return "seen in part" if any(known) else "not seen" if False in known else TOO_SMALL


def by_seed(row: Row) -> list[float]:
    """Returns a row's results, one per seed."""
    return [value for name, value in row.items() if name.startswith("seed ")]


def ranged(name: str, values: Sequence[float], middle: Callable[[Sequence[float]], float] = median) -> Row:
    """Returns the columns of a repeated measurement: its middle value as NAME, "NAME, least" and "NAME, most"."""
    return {name: middle(values), f"{name}, least": min(values), f"{name}, most": max(values)}
