"""Every command of docs/**/*.md runs, block by block, as printed but in toy size, and so does the Python.

A block runs in a folder that has the things of `belongings.THINGS` that it names, and nothing else. Blocks with the
same commands (on the pages in English and Chinese) run once. The README's blocks are run by tests/test_readme.py,
except its console blocks.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.belongings import THINGS, Store, answer
from tests.command_lines import indented_of, inline_of
from tests.endpoints.scripted import server
from tests.pages import (
    INSTEAD,
    NOT_RUN,
    ROOT,
    SMALLER,
    blocks_of,
    commands_of,
    in_folder,
    names_in,
    names_of,
    smaller,
    type_in,
)

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
CHEAP = ("diff", "explain --question", "inspect", "models", "plan", "preview", "show", "tokenize")


def sessions_of(page: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the place on a page and the commands that run one after the other: those of a block, or one line of an
    indented block; on results pages also the commands in the text."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    for block in blocks_of(page):
        if block_commands := commands_of(block.language, block.text):
            yield f"{name}:{block.line}", tuple(block_commands)
    single_lines = [*indented_of(text), *(inline_of(text) if page.parent.name == "results" else ())]
    yield from ((f"{name}: {' '.join(line.split()[1:3])}", (line,)) for line in single_lines)


def python_of(page: Path) -> str:
    return "\n".join(block.text for block in blocks_of(page) if block.language == "python")


def names_in_python(code: str) -> set[str]:
    strings = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    return {name for string in strings if isinstance(string, str) for name in names_in(string)}


ALL = {commands: where for page in reversed(PAGES) for where, commands in sessions_of(page)}
IN_README = {commands for block in blocks_of(README) if (commands := tuple(commands_of("sh", block.text)))}
SESSIONS = {commands: where for commands, where in ALL.items() if commands not in IN_README}
PYTHON = [page for page in PAGES if page != README and python_of(page)]


def marked(commands: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    cheap = all(line.startswith(tuple(f"headway {name}" for name in CHEAP)) for line in commands)
    return [] if cheap and "--ladder" not in commands[0] else [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with server(answer) as url:
        yield Store(tmp_path_factory.mktemp("belongings"), url)


def try_out(commands: Iterable[str], folder: Path, store: Store) -> None:
    for command in commands:
        if command not in NOT_RUN:
            typed = smaller(command).replace("ENDPOINT", store.endpoint)
            store.put(names_of(typed), folder)
            type_in(typed, folder)


def try_out_python(page: Path, folder: Path, store: Store) -> None:
    """Runs the Python blocks of a page one after the other in one namespace."""
    code = smaller(python_of(page))
    store.put(names_in_python(code), folder)
    in_folder(
        folder,
        lambda: exec(compile(code, page.name, "exec"), {"__name__": "__main__"}),
        f"python {page.name}",
    )


@pytest.mark.parametrize(
    "commands", [pytest.param(one, marks=marked(one), id=where) for one, where in SESSIONS.items()]
)
def test_a_block_runs(commands: tuple[str, ...], tmp_path: Path, store: Store) -> None:
    try_out(commands, tmp_path, store)


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.stem)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, store: Store) -> None:
    try_out_python(page, tmp_path, store)


TYPED = {command for commands in ALL for command in commands}


@pytest.mark.parametrize("command", NOT_RUN)
def test_what_is_not_run_is_on_a_page_and_a_test_runs_it(command: str) -> None:
    assert command in TYPED
    reason, test = NOT_RUN[command]
    file, _, name = test.partition("::")
    assert reason
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_tables_have_no_row_that_nothing_needs() -> None:
    sources = TYPED | {python_of(page) for page in PYTHON}
    for pattern, _ in INSTEAD:
        assert any(re.search(pattern, source) for source in sources), pattern
    replaced = TYPED | {re.sub(*row, source) for row in INSTEAD for source in TYPED}
    for pattern, _ in SMALLER:
        assert any(re.search(rf"\bheadway {pattern}", typed) for typed in replaced), pattern
    named = {name for source in TYPED for name in names_of(smaller(source))}
    named |= {name for page in PYTHON for name in names_in_python(smaller(python_of(page)))}
    assert set(THINGS) <= named, set(THINGS) - named


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("```sh\nheadway show 'Causal()' --tokenz 12\n```", "No such option"),
        ("```console\n$ headway inspect MODEL-Z       # what is it?\n  family  llama\n```", "MODEL-Z"),
        ("```sh\nheadway show 'Causal()' \\\n    --tokens 0 | head -3\n```", "tokens"),
        ("Text.\n\n    headway plan llama-9b    a size that there is not\n", "llama-9b"),
    ],
)
def test_a_broken_command_of_a_new_page_fails(block: str, says: str, tmp_path: Path, store: Store) -> None:
    page = tmp_path / "new.md"
    page.write_text(f"# New\n\n```sh\nheadway show 'Causal()'\n```\n\n{block}\n", encoding="utf-8")
    (_, sound), (_, broken) = sessions_of(page)
    assert sound == ("headway show 'Causal()'",)
    try_out(sound, tmp_path, store)
    with pytest.raises(AssertionError, match=says):
        try_out(broken, tmp_path, store)


def test_broken_python_of_a_new_page_fails(tmp_path: Path, store: Store) -> None:
    page = tmp_path / "new.md"
    page.write_text(
        "```python\nimport headway\n```\n\n```python\nheadway.attend(query)\n```\n", encoding="utf-8"
    )
    with pytest.raises(AssertionError, match="name 'query' is not defined"):
        try_out_python(page, tmp_path, store)
