"""Numbers that pages quote from docs/results: links whose title says where the number is on the results page.

[4.397](../results/alpaca.md "alpaca, val_loss")             a cell of a table: its row and its column
[50-fold](../results/explain.md#scale "falls 50-fold")       words of the page, here of its section `scale`
"""

import re
from pathlib import Path
from typing import NamedTuple

LINK = re.compile(r"\[([^\]]+)\]\((\.\./results/[\w-]+(?:\.zh)?\.md)(?:#([\w-]+))?(?:\s+\"([^\"]+)\")?\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
SECTION = re.compile(r"^### (.+)$", re.MULTILINE)


class Quote(NamedTuple):
    """A quotation: the page's words, the results page, the section there, and the title, which names the place."""

    words: str
    target: str
    section: str
    title: str

    @property
    def page(self) -> str:
        """The English results page."""
        return self.target.replace(".zh.md", ".md")


def quotes_of(text: str) -> list[Quote]:
    """Returns the links of a page to results, with whitespace in titles collapsed."""
    return [Quote(*(" ".join(part.split()) for part in parts)) for parts in LINK.findall(text)]


def numbers(text: str) -> list[str]:
    """Returns the numbers in a text without thousands separators: "1,095 questions" gives "1095"."""
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def check(quote: Quote, page: Path) -> None:
    """Raises AssertionError unless the results page has the quoted words or cell, and they have the quoted numbers."""
    text = page.read_text(encoding="utf-8")
    if quote.section:
        parts = SECTION.split(text)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        assert quote.section in sections, f"{page.name} has no section {quote.section}"
        text = sections[quote.section]
    quoted = numbers(quote.words)
    assert quoted, f"no number in {quote.words!r}"
    if quote.title in " ".join(text.split()):
        missing = [number for number in quoted if number not in numbers(quote.title)]
        assert not missing, f"{quote.words!r}: no {missing} in {quote.title!r}"
        return
    row, _, column = quote.title.rpartition(", ")
    value_text = cells(text).get((row, column))
    assert value_text is not None, f"{page.name} has neither the words nor the cell {quote.title!r}"
    cell_numbers = value_text.replace(" ", "") if re.fullmatch(r"[\d ]+", value_text) else value_text
    for number, value in zip(quoted, NUMBER.findall(cell_numbers), strict=False):
        digits = len(number.partition(".")[2])
        factor = 100 if "%" in quote.words and float(value) <= 1 else 1
        assert f"{factor * float(value):.{digits}f}" == number, (
            f"{quote.words!r}: {page.name} has {value_text!r}"
        )
    assert len(quoted) <= len(NUMBER.findall(cell_numbers)), (
        f"{quote.words!r}: {page.name} has {value_text!r}"
    )


def cells(text: str) -> dict[tuple[str, str], str]:
    """Returns the cells of a page's tables by (first cell of the row, column); rows of the same name are left out."""
    result: dict[tuple[str, str], str] = {}
    twice: set[str] = set()
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        parts = [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not header:
            header = parts
        elif set("".join(parts)) != {"-"}:
            keys = [(parts[0], name) for name in header[1:]]
            twice |= {parts[0]} if any(key in result for key in keys) else set()
            result |= dict(zip(keys, parts[1:], strict=True))
    return {key: value for key, value in result.items() if key[0] not in twice}
