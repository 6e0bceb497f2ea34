"""docs/results/explain.md and explain-trained.md, of the reports that `headway explain all --out FOLDER` wrote.

`python -m tests.explain.results FOLDER COMMIT` writes both, and the pictures of the trained topics beside them."""

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from headway.hardware import cores
from headway.processor import cpu_name
from headway.report import cell
from headway_lab.explain import GROUPS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TRAINED = "small models, trained"
PAGES = {
    "explain": "Topics of headway explain, computed",
    "explain-trained": "Topics of headway explain that train small models",
}
WORDS = {True: "seen", False: "NOT seen", None: "too small to tell"}
SHOWN = 12  # rows of a table that a page has in full


def groups_of(page: str) -> list[str]:
    """The groups of topics that a page has."""
    return [group for group in GROUPS if (group == TRAINED) == (page == "explain-trained")]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A table of Markdown, without columns that are empty in all rows."""
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    yield "| " + " | ".join(columns[i].replace("|", "\\|") for i in kept) + " |"
    yield "|" + " --- |" * len(kept)
    for row in rows:
        yield "| " + " | ".join(cell(row[i]) for i in kept) + " |"


def section(report: dict[str, Any], picture: bool) -> str:
    """A topic: its question, its claims, what was found and the numbers that a terminal shows of it."""
    rows = [report["rows"][i] for i in report["highlight"]] or report["rows"]
    lines = [f"### {report['topic']}", "", report["question"], ""]
    lines += [f"- {WORDS[seen]}: {claim}" for claim, seen in report["claims"].items()]
    lines += ["", f"{report['setting']}: {report['finding']}."]
    if len(rows) <= SHOWN:
        lines += ["", *table(report["columns"], rows)]
    if picture and report["picture"]:
        lines += ["", "```", report["picture"], "```"]
    if picture:
        lines += ["", f"![{report['topic']}](explain-{report['topic']}.png)"]
    return "\n".join([*lines, ""])


def page(name: str, folder: Path, commit: str) -> str:
    """One of `PAGES`."""
    topics = [topic for group in groups_of(name) for topic in GROUPS[group]]
    reports = {topic: json.loads((folder / f"{topic}.json").read_text(encoding="utf-8")) for topic in topics}
    claims = [seen for report in reports.values() for seen in report["claims"].values()]
    made = (
        f"`headway explain all --out FOLDER --threads 1`, {datetime.now(UTC):%Y-%m-%d}, at {commit}: {cpu_name()}, "
        f"{cores()} cores shared\nwith other work, one thread, torch {torch.__version__}, Python "
        f"{platform.python_version()}. Every topic at its own size and with its own seeds;\ntimes are of one core."
    )
    told = f"Of {len(claims)} claims {claims.count(True)} were seen at these sizes. What was not seen is not refuted."
    parts = [f"# {PAGES[name]}\n", f"{made}\n\n{told}\n"]
    for group in groups_of(name):
        parts += [f"## {group}\n", *(section(reports[topic], group == TRAINED) for topic in GROUPS[group])]
    return "\n".join(parts)


if __name__ == "__main__":
    folder, commit = Path(sys.argv[1]), sys.argv[2]
    for name in PAGES:
        (RESULTS / f"{name}.md").write_text(page(name, folder, commit), encoding="utf-8")
    for topic in GROUPS[TRAINED]:
        shutil.copyfile(folder / f"{topic}.png", RESULTS / f"explain-{topic}.png")
