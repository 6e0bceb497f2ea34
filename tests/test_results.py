"""docs/results: each page and its Chinese sibling have the same numbers, code, verdicts and pictures.

explain.md and explain-trained.md are written by `tests.explain.results` and tested beside it."""

import re

import pytest

from tests.command_lines import ROOT

FOLDER = ROOT / "docs" / "results"
NAMES = sorted(path.stem for path in FOLDER.glob("*.md") if not re.search(r"^explain|\.zh$", path.stem))
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)]+)\)")
NUMBER = re.compile(r"(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:e[+-]\d+)?(?: ?%)?")
CLAIM = re.compile(r"^- ([^:：(（]*[^:：(（ ])(.*)$", re.MULTILINE)
VERDICTS = {
    "seen": "可见",
    "not seen at this size": "在此规模下未见",
    "NOT seen": "未见",
    "one seed, it holds": "仅一个随机种子，成立",
    "one seed, it does not hold": "仅一个随机种子，不成立",
}


def numbers(text: str) -> list[str]:
    """Returns the numbers as written ("1,095", "1 024", "7.466e+05"), without the space in "54 %"."""
    return [number.replace(" %", "%") for number in NUMBER.findall(text)]


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_numbers_code_verdicts_and_pictures(name: str) -> None:
    files = [f"{name}.md", f"{name}.zh.md"]
    english, chinese = ((FOLDER / file).read_text(encoding="utf-8") for file in files)
    links = [text.split("\n\n")[1] for text in (english, chinese)]
    assert links == [f"[中文]({files[1]})", f"[English]({files[0]})"]
    tables, chinese_tables = (
        [numbers(table) for table in TABLE.findall(text)] for text in (english, chinese)
    )
    assert tables == chinese_tables != []
    prose, chinese_prose = (sorted(numbers(CODE.sub("", TABLE.sub("", text)))) for text in (english, chinese))
    assert prose == chinese_prose != []
    code, chinese_code = (sorted(CODE.findall(text)) for text in (english, chinese))
    assert code == chinese_code != []
    claims, chinese_claims = (
        [
            (verdict, sorted(numbers(CODE.sub("", claim))), CODE.findall(claim))
            for verdict, claim in CLAIM.findall(text)
        ]
        for text in (english, chinese)
    )
    assert [(VERDICTS[verdict], *claim) for verdict, *claim in claims] == chinese_claims != []
    assert PICTURE.findall(english) == PICTURE.findall(chinese) != []
    assert english.count("\n\n") == chinese.count("\n\n")
    for page in (ROOT / "docs" / "documents").glob("*.zh.md"):
        assert f"/{name}.md" not in page.read_text(encoding="utf-8"), f"{page.name}: {name}.zh.md"
