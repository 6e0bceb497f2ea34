"""Every command and every Python block of the README runs, section by section, in toy size.

A command runs as it is printed, or as TOY says (the same journey, smaller), or not at all, for a reason in NOT_RUN.
Sections are independent: each runs in an empty folder that SETUP fills. A `text` block that follows a block of one
command is its output: every line must be printed in that order ("..." stands for lines left out). A `console` block
is what a run of full size printed once; it is shown, not checked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data import data_path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

SMALL_RUN = "--depth 2 --context 128 --batch-tokens 512 --vocab 300 --steps 3"
TOY = {
    "make demo": "headway demo --quick",
    "make bench": "headway bench attention --case causal --tokens 64 --repeats 1 --no-tuned",
    "headway generate runs/demo --prompt 'def '": "headway generate runs/demo --prompt 'def ' -n 4",
    "headway train --data texts --validation-share 0.1 --patterns 'Window.last(128); Causal()' --out runs/mine": (
        "headway train --data texts --validation-share 0.1 --patterns 'Window.last(16); Causal()' --out runs/mine "
        + SMALL_RUN
    ),
    "headway train --data texts --family roformer --validation-share 0.1 --out runs/encoder": (
        f"headway train --data texts --family roformer --validation-share 0.1 --out runs/encoder {SMALL_RUN}"
    ),
    "headway eval runs/mine/final --data texts": "headway eval runs/mine/final --data texts --limit 500",
    "headway eval runs/demo --data runs/demo/text/held-out.jsonl": (
        "headway eval runs/demo --data runs/demo/text/held-out.jsonl --limit 500"
    ),
}
CHAT = (
    "headway train --task chat --model stories260K --template vicuna --data chats.jsonl --validation-share 0.1 "
    "--lr 1e-3"
)
TOY[f"{CHAT} --batch-tokens 2048 --epochs 10 --out runs/chat"] = f"{CHAT} --steps 2 --out runs/chat"
NOT_RUN = {
    "make test": "this is what it runs",
    "headway explain all --out book --lang zh": "every topic; tests/book writes one of a few",
}


def texts(folder: Path) -> None:
    """Two files of the standard library as somebody's texts."""
    (folder / "texts").mkdir()
    for name in ("this", "bisect"):
        source = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        shutil.copy(source, folder / "texts" / f"{name}.txt")


def trained(folder: Path) -> None:
    """The model that an earlier section trains."""
    texts(folder)
    run(TOY[next(line for line in TOY if line.startswith("headway train --data"))], folder)


def stories(folder: Path) -> None:
    for name in ("stories260K.bin", "tok512.bin"):
        shutil.copy(data_path(f"weights/stories260K/{name}"), folder)


def converted(folder: Path) -> None:
    """The model that an earlier section converts, and texts."""
    texts(folder)
    stories(folder)
    run("headway convert stories260K.bin stories260K --tokenizer tok512.bin", folder)


def conversations(folder: Path) -> None:
    """The model of an earlier section, and conversations about four colours."""
    converted(folder)
    things = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
    rounds = [
        [
            {"role": "user", "content": f"What colour is {thing}?"},
            {"role": "assistant", "content": f"{thing.capitalize()} is {colour}."},
        ]
        for thing, colour in things.items()
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
    title: re.findall(r"^```(\w+)\n(.*?)^```", body, re.DOTALL | re.MULTILINE)
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
}


def commands(block: str) -> list[str]:
    return [line.strip() for line in block.splitlines() if line.strip() and not line.startswith("#")]


def run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def assert_printed(shown: str, printed: str) -> None:
    """Every shown line is printed, in order; a shown line may be the beginning of a longer one."""
    lines = iter(printed.splitlines())
    for expected in (line.rstrip() for line in shown.splitlines() if line.strip() not in ("", "...")):
        assert any(line.startswith(expected) for line in lines), (
            f"not printed, or not in this order: {expected!r}"
        )


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
            run("python -W error block.py", tmp_path)
        else:
            assert language == "sh"
            done = [run(TOY.get(line, line), tmp_path) for line in commands(block) if line not in NOT_RUN]
            as_printed = len(done) == 1 and commands(block)[0] not in TOY
            printed = done[0] if as_printed else None


def test_the_tables_name_commands_of_the_readme() -> None:
    there = {
        line
        for blocks in SECTIONS.values()
        for kind, block in blocks
        if kind == "sh"
        for line in commands(block)
    }
    assert {*TOY, *NOT_RUN} <= there
    assert set(SETUP) <= set(SECTIONS)


PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")})


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
