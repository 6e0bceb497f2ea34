"""The pages of the book, and what `headway explain` prints without a run, as listed in tests/book/listings."""

import base64
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.language import LANGUAGES
from headway_lab import book
from headway_lab.explain import TOPICS
from tests import listings

LISTINGS = Path(__file__).parent / "listings"
FORMULA = "x = y"


def report(topic: str, *claims: bool | None, **fields: Any) -> dict[str, Any]:
    """Returns a report as JSON has it."""
    by_claim = {f"claim {n} < {n + 1}": claim for n, claim in enumerate(claims)}
    rows = [[n, n / 3, None, "a & b"] for n in range(3)]
    document = {
        "topic": topic,
        "question": f"{topic}?",
        "formula": FORMULA,
        "columns": ["n", "third", "none", "word"],
        "rows": rows,
    }
    document |= {
        "claims": by_claim,
        "setting": "n = 0..2",
        "finding": "it is so",
        "highlight": [],
        "picture": "",
    }
    return document | fields


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_book_is_written_as_listed(language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {
        "swish": report("swish", True, True),
        "scale": report("scale", True, False, None, highlight=[0, 2], picture="# <.>"),
        "masks": report("masks", None, None),
        "norms": report("norms", False, None),
    }
    tex = dict.fromkeys(reports, ()) | {"swish": ("x^2",), "scale": ("a < b", "c")}
    topics = {topic: replace(TOPICS[topic], tex=tex[topic]) for topic in reports}
    monkeypatch.setattr(book, "TOPICS", topics)
    for topic in reports:
        book.figure_of(topic, tmp_path, language).write_bytes(topic.encode())
    page = book.write_book(tmp_path, language, reports).read_text(encoding="utf-8")
    assert f"base64,{base64.b64encode(b'scale').decode()}" in page
    plain = re.sub(r"(svg\+xml;base64,)[^\"]*", r"\1", page).replace("><", ">\n<")
    listings.check(LISTINGS / f"{language}.txt", plain)


ASKED = (
    [],
    ["--question", "why divide by the square root of d"],
    ["--question", "为什么要除以根号d"],
    ["--question", "what is a cat"],
    ["--question", "does headway load gguf files", "--out", "x"],
    ["all"],
    ["all", "--n", "4", "--d", "3"],
    ["scale", "--heads", "2"],
)


def test_without_a_run_explain_prints_what_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    for arguments in ASKED:
        lines.append(f"$ explain {' '.join(arguments)}: {run(['explain', *arguments])}")
        lines += [text for text in capsys.readouterr() if text]
    listings.check(LISTINGS / "explain.txt", "\n".join(lines))
