"""All topics as one HTML book, in English or Chinese, which needs no network: figures and formulas are in the file."""

import base64
import io
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from headway.report import cell, duration
from headway.storage.files import atomic_write, json_text
from headway_lab.explain import TOPICS, explain
from headway_lab.explain.report import word_of
from headway_lab.questions import entries

SIGNS = {"seen": "✓", "not seen": "✗", "too small to tell": "?"}
CLASSES = {"seen": "", "not seen": " not", "too small to tell": " open"}
STYLE, WORDS_TEXT = (
    files("headway_lab.book").joinpath(x).read_text(encoding="utf-8") for x in ("style.css", "words.toml")
)
WORDS: Mapping[str, Mapping[str, str]] = tomllib.loads(WORDS_TEXT)


def write_book(
    out: Path,
    language: str = "en",
    topics: Iterable[str] = tuple(TOPICS),
    *,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write `out/LANGUAGE.html`, and each topic's report and figure beside it; with `quick` of smaller runs, where
    topics have them. Topics whose reports are there already, with the formulas of today and of that size, are not run
    again; `say` is told of each that is.

    Raises ConfigError for a language that is not there, and where a topic is unknown."""
    found = {entry.topic: entry for entry in entries(language)}
    names = list(topics)
    reports = {}
    for number, topic in enumerate(names, 1):
        small = quick and bool(TOPICS[topic].quick)
        time = "its quick run" if small else f"about {duration(TOPICS[topic].seconds)} of one core"
        reports[topic] = report_of(
            topic, out, small, partial(say, f"{number} of {len(names)}: {topic}, {time}")
        )
    questions = {
        topic: TOPICS[topic].question if language == "en" else found[topic].ask[0] for topic in reports
    }
    words = WORDS[language]
    chapters = [
        chapter(report, questions[topic], found[topic].answer, figure_of(topic, out), words)
        for topic, report in reports.items()
    ]
    links = "".join(
        f'<li><a href="#{topic}">{escape(asked)}</a>&nbsp;{mark(worst(reports[topic]["claims"]))}</li>'
        for topic, asked in questions.items()
    )
    legend = ", ".join(f"{mark(word)} {words[word]}" for word in SIGNS)
    page = (
        f'<!doctype html>\n<html lang="{language}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(words['title'])}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(words['title'])}</h1><ol>{links}</ol>"
        f'<p class="legend">{escape(words["legend"])}: {legend}</p>\n'
        + "\n".join(chapters)
        + "</body></html>\n"
    )
    path = out / f"{language}.html"
    atomic_write(path, page)
    return path


def report_of(
    topic: str, out: Path, quick: bool = False, before: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """A topic's report as JSON has it: that of `out/TOPIC.json` where it was made of today's formula and in that size,
    else a run, `before` which is called."""
    path, formula = out / f"{topic}.json", TOPICS[topic].formula
    if path.is_file() and figure_of(topic, out).is_file():
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if report["formula"] == formula and "claims" in report and report.get("quick", False) == quick:
            return report
    before()
    report = {**explain(topic, out, quick=quick).to_json(), "quick": quick}
    atomic_write(path, json_text(report))
    return report


def figure_of(topic: str, out: Path) -> Path:
    """Where `explain` puts a topic's figure."""
    return out / f"{topic}.png"


def chapter(
    report: Mapping[str, Any], question: str, answer: str, figure: Path, words: Mapping[str, str]
) -> str:
    """One topic: question, answer, formulas, what is verified, the figure, the verdict and the numbers."""
    topic, word = report["topic"], word_of(report["claims"].values())
    shown = [report["rows"][i] for i in report["highlight"]] or report["rows"]
    formulas = "".join(formula_image(tex) for tex in TOPICS[topic].tex)
    picture = (
        f'<div class="picture"><pre>{escape(report["picture"])}</pre></div>' if report["picture"] else ""
    )
    return (
        f'<section id="{topic}"><h2>{escape(question)}</h2><p>{escape(answer)}</p>'
        f'<div class="formula">{formulas}</div>'
        f"<details><summary>{words['what']}</summary><pre>{escape(report['formula'])}</pre></details>"
        f'<figure><img alt="{escape(question)}" src="{data_uri(figure.read_bytes(), "image/png")}"></figure>{picture}'
        f'<p class="verdict{CLASSES[worst(report["claims"])]}"><strong>{words[word]}</strong> '
        f'<span lang="en">({escape(report["setting"])}): {escape(report["finding"])}</span></p>'
        f"{claims_list(report['claims'])}"
        f'<details><summary>{words["table"]}</summary><div class="numbers">{html_table(report["columns"], shown)}'
        f"</div></details><p>{words['run']}: <code>headway explain {topic}</code></p></section>"
    )


def worst(claims: Mapping[str, bool | None]) -> str:
    """What `SIGNS` has a sign for: not seen where a claim is not, else too small to tell where one of them is."""
    words = {word_of([seen]) for seen in claims.values()}
    return next((word for word in ("not seen", "too small to tell") if word in words), "seen")


def mark(word: str) -> str:
    """Whether a run shows what is claimed, as a sign."""
    return f'<span class="mark{CLASSES[word]}">{SIGNS[word]}</span>'


def claims_list(claims: Mapping[str, bool | None]) -> str:
    """Each claim with its result."""
    items = (f"<li>{mark(word_of([seen]))} {escape(claim)}</li>" for claim, seen in claims.items())
    return f'<ul class="claims" lang="en">{"".join(items)}</ul>'


def html_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Numbers as a terminal shows them."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell(value))}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def formula_image(tex: str) -> str:
    """A formula as an image of the page, with its TeX as text. Raises ValueError for TeX that mathtext lacks."""
    import matplotlib
    from matplotlib.mathtext import math_to_image

    written = io.BytesIO()
    with matplotlib.rc_context({"mathtext.fontset": "cm", "svg.hashsalt": "headway", "font.size": 14}):
        math_to_image(f"${tex}$", written, format="svg", prop=None, dpi=72)
    undated = re.sub(rb"<metadata>.*?</metadata>", b"", written.getvalue(), flags=re.DOTALL)
    return f'<img alt="{escape(tex)}" src="{data_uri(undated, "image/svg+xml")}">'


def data_uri(data: bytes, kind: str) -> str:
    """Bytes as an address of their own."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
