"""docs/pictures.md lists every topic's picture and every picture of docs."""

import re

from headway_lab.explain import TOPICS
from tests.command_lines import ROOT

DOCS = ROOT / "docs"
TEXT = (DOCS / "pictures.md").read_text(encoding="utf-8")


def test_every_topic_has_a_picture_and_something_to_show() -> None:
    table = TEXT.partition("## Topics")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE))
    assert sorted(rows) == sorted(TOPICS)
    assert all(len(show) > 20 for show in rows.values())


def test_every_picture_of_docs_is_listed() -> None:
    listed = re.findall(r"\]\(([\w/.-]+\.(?:png|svg))\)", TEXT)
    assert sorted(listed) == sorted(
        str(path.relative_to(DOCS)) for kind in ("png", "svg") for path in DOCS.rglob(f"*.{kind}")
    )
