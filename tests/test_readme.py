"""Every command and every Python block of the README runs, section by section, in toy size (tests/pages.py).

Sections are independent: each runs in an empty folder that SETUP fills. A `text` block that follows a block of one
command is its output: every line must be printed in that order ("..." stands for omitted lines). A `console` block is
what a run of full size printed once; it is not checked.
"""

import json
import re
import runpy
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data import data_path
from tests.pages import BLOCK, NOT_RUN, ROOT, assert_printed, commands_of, in_folder, smaller, type_in

README = (ROOT / "README.md").read_text()


def texts(folder: Path) -> None:
    """Writes two files of the standard library as texts."""
    (folder / "texts").mkdir()
    for name in ("this", "bisect"):
        source = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        shutil.copy(source, folder / "texts" / f"{name}.txt")


def trained(folder: Path) -> None:
    """Trains the model of an earlier section, with texts beside it."""
    texts(folder)
    type_in(smaller("headway train --data texts --validation-share 0.1 --out runs/mine"), folder)


def stories(folder: Path) -> None:
    for name in ("stories260K.bin", "tok512.bin"):
        shutil.copy(data_path(f"weights/stories260K/{name}"), folder)


def converted(folder: Path) -> None:
    """Converts the model of an earlier section, with texts beside it."""
    texts(folder)
    stories(folder)
    type_in("headway convert stories260K.bin stories260K --tokenizer tok512.bin", folder)


def conversations(folder: Path) -> None:
    """Converts the model of an earlier section, and writes conversations about four colours."""
    converted(folder)
    colours = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
    rounds = [
        [
            {"role": "user", "content": f"What colour is {noun}?"},
            {"role": "assistant", "content": f"{noun.capitalize()} is {colour}."},
        ]
        for noun, colour in colours.items()
    ]
    chats = [{"messages": rounds[i % 4] + rounds[(i // 4) % 4] * (i % 3 > 0)} for i in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def nothing(folder: Path) -> None:
    pass


SETUP: dict[str, Callable[[Path], None]] = {
    "Train, continue, measure": texts,
    "Bring a checkpoint": stories,
    "Encoders and translators": texts,
    "Fine-tune on conversations": conversations,
    "Change a model": converted,
    "Keep your stack": trained,
}
SECTIONS = {
    title: BLOCK.findall(body)
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
}


def run_block() -> None:
    warnings.simplefilter("error")
    runpy.run_path("block.py", run_name="__main__")


@pytest.mark.parametrize("title", [title for title, blocks in SECTIONS.items() if blocks])
def test_the_section_runs(title: str, tmp_path: Path) -> None:
    SETUP.get(title, nothing)(tmp_path)
    printed: str | None = None
    for language, block in SECTIONS[title]:
        if language == "console":
            continue
        if language == "text":
            assert printed is not None, "a text block follows a block of one command that runs as printed"
            assert_printed(block, printed)
        elif language == "python":
            (tmp_path / "block.py").write_text(block)
            in_folder(tmp_path, run_block, "python -W error block.py")
        else:
            assert language == "sh"
            lines = [line for line in commands_of("sh", block) if line not in NOT_RUN]
            outputs = [type_in(smaller(line), tmp_path) for line in lines]
            printed = outputs[0] if len(outputs) == 1 and smaller(lines[0]) == lines[0] else None


def test_setups_are_of_sections() -> None:
    assert set(SETUP) <= set(SECTIONS)


CHINESE = ROOT / "README.zh.md"
PAGES = sorted({ROOT / "README.md", CHINESE, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")})


def test_the_readme_in_chinese_has_the_same_blocks_headings_links_pictures_and_names() -> None:
    """Blocks in the same order; links may differ in their language."""
    chinese = CHINESE.read_text(encoding="utf-8")
    assert BLOCK.findall(chinese) == BLOCK.findall(README)
    texts = [re.sub(r"\.(en|zh)\.", ".", BLOCK.sub("", text)) for text in (README, chinese)]
    for kind in (r"(?m)^#+ ", r"(!?)\[[^]]*\]\(([^)]+)\)", r"`[^`\n]+`"):
        matches = [sorted(re.findall(kind, text)) for text in texts]
        assert matches[0] == matches[1] != []


def test_every_page_is_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", README))
    assert linked == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_exists(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"def {name or ''}" in (ROOT / file).read_text(), f"{file}::{name}"
