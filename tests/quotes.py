"""Numbers that pages quote from docs/results: links whose title says where on the results page the number stands.

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
    """What a page quotes: its words, the results page, the section there, and the title: the place in it."""

    words: str
    target: str
    section: str
    title: str

    @property
    def page(self) -> str:
        """The results page in English."""
        return self.target.replace(".zh.md", ".md")


def quotes_of(text: str) -> list[Quote]:
    """The links of a page to results, titles on one line."""
    return [Quote(*(" ".join(part.split()) for part in found)) for found in LINK.findall(text)]


def numbers(text: str) -> list[str]:
    """The numbers of a text without the commas of thousands: "1,095 questions" has "1095"."""
    return [number.replace(",", "") for number in NUMBER.findall(text)]


def check(quote: Quote, page: Path) -> None:
    """Raises AssertionError unless the results page says what is quoted: words that it does not have, a number that its
    cell or its words do not have."""
    text = page.read_text(encoding="utf-8")
    if quote.section:
        parts = SECTION.split(text)
        sections = dict(zip(parts[1::2], parts[2::2], strict=True))
        assert quote.section in sections, f"{page.name} has no section {quote.section}"
        text = sections[quote.section]
    own = numbers(quote.words)
    assert own, f"no number in {quote.words!r}"
    if quote.title in " ".join(text.split()):
        missing = [number for number in own if number not in numbers(quote.title)]
        assert not missing, f"{quote.words!r}: no {missing} in {quote.title!r}"
        return
    row, _, column = quote.title.rpartition(", ")
    found = cells(text).get((row, column))
    assert found is not None, f"{page.name} has neither the words nor the cell {quote.title!r}"
    there = found.replace(" ", "") if re.fullmatch(r"[\d ]+", found) else found
    for number, value in zip(own, NUMBER.findall(there), strict=False):
        digits = len(number.partition(".")[2])
        factor = 100 if "%" in quote.words and float(value) <= 1 else 1
        assert f"{factor * float(value):.{digits}f}" == number, f"{quote.words!r}: {page.name} has {found!r}"
    assert len(own) <= len(NUMBER.findall(there)), f"{quote.words!r}: {page.name} has {found!r}"


def cells(text: str) -> dict[tuple[str, str], str]:
    """The cells of a page's tables by row, which its first cell names, and column; none of rows of one name."""
    found: dict[tuple[str, str], str] = {}
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
            twice |= {parts[0]} if any(key in found for key in keys) else set()
            found |= dict(zip(keys, parts[1:], strict=True))
    return {key: value for key, value in found.items() if key[0] not in twice}
