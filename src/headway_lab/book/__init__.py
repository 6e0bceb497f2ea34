"""All topics as one HTML book, in English or Chinese, which needs no network: figures and formulas are in the file."""

import base64
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from headway.report import cell, duration
from headway.storage.files import atomic_write, json_text
from headway_lab.explain import TOPICS, explain, settings_of
from headway_lab.explain.report import word_of
from headway_lab.questions import entries

WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "title": "Questions about attention, answered by runs",
        "seen": "seen at this size",
        "seen in part": "seen in part at this size",
        "not seen": "not seen at this size",
        "too small to tell": "this run is too small to tell",
        "table": "the numbers",
        "what": "what is verified",
        "run": "run it",
        "legend": "verdicts of the runs in this book",
    },
    "zh": {
        "title": "用运行回答关于注意力的问题",
        "seen": "在此规模下可见",
        "seen in part": "在此规模下部分可见",
        "not seen": "在此规模下未见",
        "too small to tell": "这次运行规模太小，无法判断",
        "table": "数据",
        "what": "验证的内容",
        "run": "运行",
        "legend": "本书各次运行的结论（结论与图为英文）",
    },
}
SIGNS = {"seen": "✓", "not seen": "✗", "too small to tell": "?"}
CLASSES = {"seen": "", "not seen": " not", "too small to tell": " open"}
STYLE = """
body { max-width: 46rem; margin: 0 auto; padding: 1rem; color: #222; overflow-wrap: break-word;
  font: 1rem/1.6 system-ui, "PingFang SC", "Noto Sans CJK SC", "Microsoft YaHei", sans-serif; }
h1, h2 { line-height: 1.3; text-wrap: balance; }
h1 { font-size: 1.7rem; }
h2 { margin-top: 3.5rem; font-size: 1.3rem; }
img { max-width: 100%; height: auto; }
ol { padding-left: 2rem; }
li { margin: .2rem 0; }
a { color: #1f5a99; text-decoration-color: #bcd; text-underline-offset: .2em; }
.mark { color: #3a7; }
.mark.not { color: #b44; }
.mark.open { color: #a70; font-weight: bold; }
.claims { list-style: none; padding-left: 2rem; font-size: .9rem; }
.claims li { text-indent: -1.2rem; }
code { white-space: nowrap; }
.legend { font-size: .85rem; color: #666; }
.formula img { display: block; margin: .8rem auto; }
figure { margin: 1.2rem 0; overflow-x: auto; }
@media (max-width: 40rem) { figure img { max-width: none; width: 38rem; } }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; background: #f6f6f4; padding: .6rem; }
.picture pre, .numbers { overflow-x: auto; }
.picture pre { white-space: pre; overflow-wrap: normal; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
td, th { white-space: nowrap; padding: .15rem .5rem; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.verdict { border-left: .3rem solid #3a7; padding-left: .8rem; }
.verdict.not { border-color: #b44; }
.verdict.open { border-color: #a70; }
"""


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
        small = quick and "quick" in settings_of(topic)
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
