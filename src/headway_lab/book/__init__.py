"""All topics as one self-contained HTML book, in English or Chinese; figures and formulas are embedded in the file."""

import base64
import io
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from headway.language import LANGUAGES, Translation, check_language
from headway.report import cell, duration
from headway.storage.files import atomic_write, json_text
from headway_lab.explain import TOPICS, check_fonts, figure_name, measure
from headway_lab.explain.report import word_of
from headway_lab.explain.tables import translation
from headway_lab.explain.topics import topics_in
from headway_lab.questions import entries

SIGNS = {"seen": "✓", "not seen": "✗", "too small to tell": "?"}
CLASSES = {"seen": "", "not seen": " not", "too small to tell": " open"}
STYLE, WORDS_TEXT = (
    files("headway_lab.book").joinpath(x).read_text(encoding="utf-8") for x in ("style.css", "words.toml")
)
WORDS: Mapping[str, Mapping[str, str]] = tomllib.loads(WORDS_TEXT)


def write_books(
    out: Path,
    topics: Iterable[str] = tuple(TOPICS),
    languages: Sequence[str] = LANGUAGES,
    *,
    quick: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Writes `out/LANGUAGE.html` for each language, and each topic's reports and figures beside it; with `quick` from
    smaller runs, if a topic has one. A topic runs once for all languages, and not at all if reports with today's
    formulas and of that size exist already; `say` is called with a line before each run.

    Raises ConfigError for an unknown language, a language that no font can label figures in, or an unknown topic."""
    for language in languages:
        check_language(language, "book")
        check_fonts(language)
    names = list(topics)
    reports = {}
    for number, topic in enumerate(names, 1):
        quick_run = quick and bool(TOPICS[topic].quick)
        time = "its quick run" if quick_run else f"about {duration(TOPICS[topic].seconds)} of one core"
        announce = partial(say, f"{number} of {len(names)}: {topic}, {time}")
        reports[topic] = reports_of(topic, out, languages, quick_run, announce)
    return [
        write_book(out, language, {topic: by_language[language] for topic, by_language in reports.items()})
        for language in languages
    ]


def write_book(out: Path, language: str, reports: Mapping[str, Mapping[str, Any]]) -> Path:
    """Writes `out/LANGUAGE.html` from reports in that language, keyed by topic."""
    words = WORDS[language]
    answers = {entry.topic: entry.answer for entry in entries(language)}
    chapters = [
        chapter(report, answers[topic], figure_of(topic, out, language), language)
        for topic, report in reports.items()
    ]
    links = "".join(
        f'<li><a href="#{topic}">{escape(report["question"])}</a>&nbsp;{mark(worst(report["claims"]))}</li>'
        for topic, report in reports.items()
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


def reports_of(
    topic: str,
    out: Path,
    languages: Sequence[str] = LANGUAGES,
    quick: bool = False,
    before: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Returns a topic's reports by language, as their JSON objects: those in `out/TOPIC.LANGUAGE.json` if all have
    today's formula and size, else those of a new run, before which `before` is called."""
    existing = {language: _kept(topic, out, language, quick) for language in languages}
    if all(existing.values()):
        return {language: report for language, report in existing.items() if report}
    before()
    run = measure(topic, quick=quick)
    reports = {language: {**run.told(language, out).to_json(), "quick": quick} for language in languages}
    for language, report in reports.items():
        atomic_write(report_of(topic, out, language), json_text(report))
    return reports


def _kept(topic: str, out: Path, language: str, quick: bool) -> dict[str, Any] | None:
    """Returns an existing report if it has today's formula, the same size, and its figure; else None."""
    path = report_of(topic, out, language)
    if not (path.is_file() and figure_of(topic, out, language).is_file()):
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    current = report["formula"] == topics_in(language)[topic].formula
    return report if current and report["quick"] == quick else None


def report_of(topic: str, out: Path, language: str = "en") -> Path:
    """Returns the path of a topic's report in the book's folder."""
    return out / f"{topic}.{language}.json"


def figure_of(topic: str, out: Path, language: str = "en") -> Path:
    """Returns the path of a topic's figure in the folder of `explain`."""
    return out / figure_name(topic, language)


def chapter(report: Mapping[str, Any], answer: str, figure: Path, language: str) -> str:
    """Returns one topic as HTML: question, answer, formulas, what is verified, the figure, the verdict and the
    numbers."""
    words, say = WORDS[language], translation(language)
    topic, word, question = report["topic"], word_of(report["claims"].values()), report["question"]
    rows = [report["rows"][i] for i in report["highlight"]] or report["rows"]
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
        f"({escape(report['setting'])}): {escape(report['finding'])}</p>"
        f"{claims_list(report['claims'])}"
        f'<details><summary>{words["table"]}</summary><div class="numbers">{html_table(report["columns"], rows, say)}'
        f"</div></details><p>{words['run']}: <code>headway explain {topic}</code></p></section>"
    )


def worst(claims: Mapping[str, bool | None]) -> str:
    """Returns the key of `SIGNS` for a set of claims: "not seen" if any claim is, else "too small to tell" if any is,
    else "seen"."""
    words = {word_of([seen]) for seen in claims.values()}
    return next((word for word in ("not seen", "too small to tell") if word in words), "seen")


def mark(word: str) -> str:
    """Returns a sign for whether a run shows what is claimed."""
    return f'<span class="mark{CLASSES[word]}">{SIGNS[word]}</span>'


def claims_list(claims: Mapping[str, bool | None]) -> str:
    """Returns each claim with its result as an HTML list."""
    items = (f"<li>{mark(word_of([seen]))} {escape(claim)}</li>" for claim, seen in claims.items())
    return f'<ul class="claims">{"".join(items)}</ul>'


def html_table(columns: Iterable[str], rows: Iterable[Iterable[object]], say: Translation) -> str:
    """Returns rows as an HTML table, with numbers formatted as in a terminal and names translated by `say`."""
    head = "".join(f"<th>{escape(say(name))}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(say(cell(value)))}</td>' for value in row)}</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def formula_image(tex: str) -> str:
    """Returns a formula as an embedded SVG image, with its TeX as alternative text. Raises ValueError for TeX that
    mathtext does not support."""
    import matplotlib
    from matplotlib.mathtext import math_to_image

    written = io.BytesIO()
    with matplotlib.rc_context({"mathtext.fontset": "cm", "svg.hashsalt": "headway", "font.size": 14}):
        math_to_image(f"${tex}$", written, format="svg", prop=None, dpi=72)
    without_date = re.sub(rb"<metadata>.*?</metadata>", b"", written.getvalue(), flags=re.DOTALL)
    return f'<img alt="{escape(tex)}" src="{data_uri(without_date, "image/svg+xml")}">'


def data_uri(data: bytes, kind: str) -> str:
    """Returns bytes as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
