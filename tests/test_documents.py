"""docs/documents has a page in English and one in Chinese on each of five texts; they name the same things, correctly.

Commands are parsed, not run: every topic that they name runs in tests/explain, every recipe in tests/recipes.
"""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from headway.attention import choose
from headway.patterns import Window, draw
from headway.patterns.count import span
from tests.command_lines import (
    BLOCK,
    ROOT,
    click_command,
    indented_of,
    inline_of,
    lines_of,
    read_command,
    read_mention,
)
from tests.pages import assert_printed, commands_of, type_in
from tests.quotes import Quote, check, numbers, quotes_of
from tests.requirements import slips
from tests.test_architecture import top_level

FOLDER = ROOT / "docs" / "documents"
NAMES = sorted({path.name.partition(".")[0] for path in FOLDER.glob("*.??.md")})
PAGES = sorted(FOLDER.glob("*.??.md"))
PLACE = re.compile(r"`((?:src|tests|recipes|docs)/[\w/.-]+?\.(?:py|yaml|md))(?:::?(\w+))?`")
MENTIONED = re.compile(r"\*\*(E\d+)\.\*\*")
COMMANDS = sorted(
    {
        line
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for line in [
            *lines_of(page.read_text(encoding="utf-8")),
            *(inline_of(page.read_text(encoding="utf-8")) if page.parent == FOLDER else ()),
        ]
    }
)


SOURCES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").rglob("*.md"),
    *(path for path in (ROOT / "recipes").rglob("*.*") if path.suffix != ".pyc"),
    *(ROOT / "src").rglob("*.py"),
)
INDENTED = sorted({line for path in SOURCES for line in indented_of(path.read_text(encoding="utf-8"))})
MENTIONS = sorted({line for path in SOURCES for line in inline_of(path.read_text(encoding="utf-8"))})


QUOTES = sorted(
    {quote for page in PAGES for quote in quotes_of(page.read_text(encoding="utf-8")) if quote.title}
)
PRINTED = re.compile(r"^```sh\n([^\n]+)\n```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def outputs_of(text: str) -> list[tuple[str, str]]:
    """Returns the commands whose output a page shows, with the shown output."""
    return PRINTED.findall(text)


OUTPUTS = sorted({pair for page in PAGES for pair in outputs_of(page.read_text(encoding="utf-8"))})


def text_of(name: str, language: str) -> str:
    return (FOLDER / f"{name}.{language}.md").read_text(encoding="utf-8")


def test_there_are_five_documents_in_two_languages() -> None:
    assert len(NAMES) == 5
    assert [path.name for path in PAGES] == [
        f"{name}.{language}.md" for name in NAMES for language in ("en", "zh")
    ]
    linked = re.findall(r"\]\(([\w.-]+\.md)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == [path.name for path in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_formulas_commands_places_and_slips(name: str) -> None:
    english, chinese = text_of(name, "en"), text_of(name, "zh")
    formulas = [
        [block for kind, block in BLOCK.findall(text) if kind == "math"] for text in (english, chinese)
    ]
    assert formulas[0] == formulas[1] != []
    assert lines_of(english) == lines_of(chinese) != []
    for pattern in (PLACE, MENTIONED):
        assert pattern.findall(english) == pattern.findall(chinese)
    assert english.count("\n#") == chinese.count("\n#")
    assert outputs_of(english) == outputs_of(chinese)
    assert quotes_of(english)
    for ours, theirs in zip(quotes_of(english), quotes_of(chinese), strict=True):
        assert (ours.page, ours.section) == (theirs.page, theirs.section)
        assert sorted(numbers(ours.words)) == sorted(numbers(theirs.words))
        translated = ours.target != theirs.target and sorted(numbers(ours.title)) == sorted(
            numbers(theirs.title)
        )
        assert ours.title == theirs.title or translated, theirs.title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_no_book_and_what_it_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert 80 <= text.count("\n") <= 340
    assert (re.search(r"[\u4e00-\u9fff]{6}", text) is not None) or ".en." in page.name
    places = PLACE.findall(text)
    assert places
    for file, name in places:
        assert (ROOT / file).is_file(), file
        assert not name or name in top_level(ROOT / file), f"{file}:{name}"
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith("https://") or (page.parent / target).is_file(), target


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_slip_is_put_right_on_both_pages_of_its_document(language: str) -> None:
    mentioned = {name: sorted(MENTIONED.findall(text_of(name, language))) for name in NAMES}
    named = {name: sorted(slip.name for slip in slips() if slip.page == name) for name in NAMES}
    assert mentioned == named


@pytest.mark.parametrize("language", ["en", "zh"])
def test_row_100_the_kernels_of_windows_are_those_that_are_chosen(language: str) -> None:
    """For each device, the page names the backend that `auto` takes for a window, and no other."""
    rows = [
        line for line in text_of("longformer-rope-gqa", language).splitlines() if line.startswith("| cuda |")
    ]
    for device, row in zip(("cpu", "cuda"), rows, strict=True):
        for window in (Window.last(512), Window.last(512, step=2), Window.around(256)):
            backend = choose(window, queries=8192, keys=8192, heads=12, gradient=True, device=device).what
            assert re.findall(r"`(\w+)`", row) == [backend]
            assert {"cpu": "CPU", "cuda": "GPU"}[device] in row


@pytest.mark.parametrize("language", ["en", "zh"])
def test_row_104_the_page_s_spans_are_those_that_are_counted(language: str) -> None:
    text = text_of("longformer-rope-gqa", language)
    kernels, dilated = [Window.around(n) for n in (3, 2, 1)], Window.last(3, step=8)
    formula = 1 + sum((window.before + window.after) * window.step for window in kernels)
    assert span(kernels) == formula == 13
    assert (span([dilated]), draw(dilated, 64).splitlines()[-1].count("#")) == (17, 3)
    assert [
        re.findall(r"\d+", part) for part in re.findall(r"(?:together they|三层合起来)[^)）]*", text)
    ] == [["13"]]
    assert re.search(r"`Window.last\(3, step=8\)` \D*17\D+3 *\D", text)


def test_papers_have_their_own_numbers() -> None:
    links = {
        "Longformer": "2004.05150",
        "RoFormer": "2104.09864",
        "GQA": "2305.13245",
    }
    for language in ("en", "zh"):
        head = text_of("longformer-rope-gqa", language).partition("##")[0]
        for paper, number in links.items():
            assert re.search(
                rf"{paper}\s*[(\uff08][^(\uff08]*\[arXiv:{number}\]\(https://arxiv\.org/abs/{number}\)", head
            )


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_pages_is_read(line: str) -> None:
    read_command(line)


@pytest.mark.parametrize("line", INDENTED)
def test_a_command_of_an_indented_block_or_a_comment_is_read(line: str) -> None:
    read_command(line)


@pytest.mark.parametrize("line", MENTIONS)
def test_a_command_that_a_sentence_mentions_is_there_with_its_options(line: str) -> None:
    read_mention(line)


def test_commands_are_found_where_they_stand() -> None:
    assert indented_of("    headway plan A --batch 4   # why\n# headway show 'X' \\\n#   --json\n") == [
        "headway plan A --batch 4",
        "headway show 'X' --json",
    ]
    assert "headway bench growth" in INDENTED
    assert inline_of("by `headway plan MODEL --batch` and `headway one row`") == [
        "headway plan MODEL --batch"
    ]
    assert min(len(COMMANDS), len(MENTIONS)) > 50


def test_an_option_that_is_renamed_is_noticed_wherever_a_page_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (option,) = [parameter for parameter in click_command("plan").params if "--batch" in parameter.opts]
    monkeypatch.setattr(option, "opts", ["--rows"])
    named = [line for line in MENTIONS if line.startswith("headway plan ") and "--batch" in line]
    for read, lines in (
        (read_mention, named),
        (read_command, [x for x in COMMANDS if "plan" in x and "--batch" in x]),
    ):
        assert lines
        for line in lines:
            with pytest.raises(Exception, match="--batch"):
                read(line)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("headway plam MODEL", "plam"),
        ("headway eval --limits 12000", "--limits"),
        ("headway bench train --no-memories", "--no-memories"),
        ("headway train --task clasify", "clasify"),
    ],
)
def test_a_mention_of_what_is_not_there_is_noticed(line: str, says: str) -> None:
    with pytest.raises(Exception, match=says):
        read_mention(line)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_python_of_a_page_compiles_and_what_it_imports_is_there(page: Path) -> None:
    for number, (language, block) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
        if language == "python":
            tree = compile(block, f"{page.name}, block {number}", "exec", ast.PyCF_ONLY_AST)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("headway"):
                    module = importlib.import_module(str(node.module))
                    for alias in node.names:
                        assert hasattr(module, alias.name) or importlib.util.find_spec(
                            f"{node.module}.{alias.name}"
                        )
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        assert not alias.name.startswith("headway") or importlib.import_module(alias.name)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("headway explain rotary-identiti", "rotary-identiti"),
        ("headway train --config recipes/none.yaml", "none.yaml"),
        ("headway plan llama-9b", "llama-9b"),
        ("headway show 'Windo.last(3)'", "Windo"),
        ("headway judge A B --endpoint URL", "--endpoint"),
        ("headway bench nothing", "nothing"),
        ("headway train --config recipes/small.yaml lrr=1", "lrr"),
        ("headway train --config recipes/llama.yaml steps=many", "steps"),
    ],
)
def test_a_command_that_is_not_there_is_noticed(line: str, says: str) -> None:
    with pytest.raises(Exception, match=says):
        read_command(line)


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{Path(quote.target).stem}-{quote.words}"[:60])
def test_a_number_that_a_page_quotes_is_the_one_of_the_results(quote: Quote) -> None:
    check(quote, FOLDER / quote.target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_runs_has_its_measured_answer_beside_it(page: Path) -> None:
    """Each topic on a page has a quoted number of its section, each recipe with a results page one of that page."""
    text = page.read_text(encoding="utf-8")
    quotes, lines = quotes_of(text), "\n".join(lines_of(text))
    topics = set(re.findall(r"headway explain ([a-z][\w-]+)", lines)) - {"figures"}
    assert topics - {quote.section for quote in quotes} == set()
    recipes = {f"../results/{name}.md" for name in re.findall(r"recipes/([\w-]+)\.yaml", lines)}
    existing = {target for target in recipes if (FOLDER / target).is_file()}
    assert existing - {quote.page for quote in quotes} == set()
    assert all(quote.title or not numbers(quote.words) for quote in quotes)


@pytest.mark.parametrize(("command", "shown"), OUTPUTS)
def test_what_a_page_shows_of_an_output_is_printed(command: str, shown: str, tmp_path: Path) -> None:
    assert commands_of("sh", command) == [command]
    assert_printed(shown, type_in(command, tmp_path))
