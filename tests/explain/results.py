"""Writes docs/results/explain.md and explain-trained.md, in English and Chinese, from the reports that `headway explain
all --out FOLDER` wrote, and the verdicts that `headway explain --question` quotes.

`python -m tests.explain.results FOLDER COMMIT` writes them, and the pictures of the trained topics beside them."""

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from headway.cores import cores
from headway.language import LANGUAGES, Translation
from headway.processor import cpu_name
from headway.report import cell
from headway_lab import questions
from headway_lab.book import report_of
from headway_lab.explain import GROUPS, TOPICS, figure_name
from headway_lab.explain.tables import translation

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TRAINED = "small models, trained"
PAGES = {
    "explain": {"en": "Topics of headway explain, computed", "zh": "由计算回答的主题（headway explain）"},
    "explain-trained": {
        "en": "Topics of headway explain that train small models",
        "zh": "由训练小模型回答的主题（headway explain）",
    },
}
WORDS = {
    "en": {True: "seen", False: "NOT seen", None: "too small to tell"},
    "zh": {True: "可见", False: "未见", None: "规模太小，无法判断"},
}
MADE = {
    "en": "`headway explain all --out FOLDER --threads 1`, {day}, at {commit}: {cpu}, {cores} cores,\n"
    "one thread, torch {torch}, Python {python}. Every topic at its own size and with its own seeds;\n"
    "times are of one core.",
    "zh": "`headway explain all --out FOLDER --threads 1`，{day}，提交 {commit}：{cpu}，{cores} 核，单线程，\n"
    "torch {torch}，Python {python}。每个主题用它自己的规模和随机种子；时间为单核时间。",
}
COUNTS = {
    "en": "Of {all} claims {seen} were seen at these sizes. What was not seen is not refuted.",
    "zh": "{all} 条论断中，{seen} 条在这些规模下可见。未见不等于被否定。",
}
VERDICTS = Path(questions.__file__).with_name("verdicts.toml")
SHOWN = 12  # a page has no table with more rows


def groups_of(page: str) -> list[str]:
    """Returns the groups of topics on a page."""
    return [group for group in GROUPS if (group == TRAINED) == (page == "explain-trained")]


def page_of(name: str, language: str) -> Path:
    """Returns the file of a page: NAME.md, or NAME.zh.md in Chinese."""
    return RESULTS / (f"{name}.md" if language == "en" else f"{name}.{language}.md")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], say: Translation) -> Iterator[str]:
    """Yields the lines of a Markdown table, without columns that are empty in all rows."""
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    yield "| " + " | ".join(say(columns[i]).replace("|", "\\|") for i in kept) + " |"
    yield "|" + " --- |" * len(kept)
    for row in rows:
        yield "| " + " | ".join(say(cell(row[i])) for i in kept) + " |"


def section(report: dict[str, Any], picture: bool) -> str:
    """Returns the section of a topic: its question, claims, finding and the numbers that a terminal shows."""
    language = report["language"]
    words, say = WORDS[language], translation(language)
    rows = [report["rows"][i] for i in report["highlight"]] or report["rows"]
    lines = [f"### {report['topic']}", "", report["question"], ""]
    lines += [f"- {words[seen]}: {claim}" for claim, seen in report["claims"].items()]
    lines += ["", say.fill("{setting}: {finding}.", setting=report["setting"], finding=report["finding"])]
    if len(rows) <= SHOWN:
        lines += ["", *table(report["columns"], rows, say)]
    if picture and report["picture"]:
        lines += ["", "```", report["picture"], "```"]
    if picture:
        lines += ["", f"![{report['topic']}](explain-{figure_name(report['topic'], language)})"]
    return "\n".join([*lines, ""])


def page(name: str, folder: Path, commit: str, language: str) -> str:
    """Returns the text of one of `PAGES`."""
    topics = [topic for group in groups_of(name) for topic in GROUPS[group]]
    reports = {topic: read(folder, topic, language) for topic in topics}
    claims = [seen for report in reports.values() for seen in report["claims"].values()]
    machine = {
        "cpu": cpu_name(),
        "cores": cores(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    origin = MADE[language].format(day=f"{datetime.now(UTC):%Y-%m-%d}", commit=commit, **machine)
    counts = COUNTS[language].format(all=len(claims), seen=claims.count(True))
    link = {"en": f"[中文]({name}.zh.md)", "zh": f"[English]({name}.md)"}[language]
    parts = [f"# {PAGES[name][language]}\n", f"{link}\n\n{origin}\n\n{counts}\n"]
    say = translation(language)
    for group in groups_of(name):
        sections = [section(reports[topic], group == TRAINED) for topic in GROUPS[group]]
        parts += [f"## {say(group)}\n", *sections]
    return "\n".join(parts)


def read(folder: Path, topic: str, language: str) -> dict[str, Any]:
    """Returns a topic's report, which `headway explain --out` wrote."""
    report: dict[str, Any] = json.loads(report_of(topic, folder, language).read_text(encoding="utf-8"))
    return report


def verdicts(folder: Path, commit: str) -> str:
    """Returns what `headway explain --question` quotes: the verdict of each topic by language, and the run it is
    from."""
    lines = [
        "# Verdicts of topics, as docs/results/explain*.md have them; `python -m tests.explain.results` renews them."
    ]
    for topic in TOPICS:
        by_language = [
            f"{language} = {json.dumps(read(folder, topic, language)['verdict'], ensure_ascii=False)}"
            for language in LANGUAGES
        ]
        lines += [
            "",
            f"[{topic}]",
            f'made = "{datetime.now(UTC):%Y-%m-%d}, {commit}, {cpu_name()}"',
            *by_language,
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    folder, commit = Path(sys.argv[1]), sys.argv[2]
    for language in LANGUAGES:
        for name in PAGES:
            page_of(name, language).write_text(page(name, folder, commit, language), encoding="utf-8")
        for topic in GROUPS[TRAINED]:
            picture = figure_name(topic, language)
            shutil.copyfile(folder / picture, RESULTS / f"explain-{picture}")
    VERDICTS.write_text(verdicts(folder, commit), encoding="utf-8")
