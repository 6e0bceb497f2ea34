"""Topics in Chinese: every name that a report, its table or its figure shows has its translation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from headway import fonts
from headway.cli import run
from headway.errors import ConfigError
from headway.language import Translation, language_of_environment
from headway.report import cell, padded, table, width
from headway_lab import draw
from headway_lab.explain import TOPICS, explain, find_topic
from headway_lab.explain.figures import translate
from headway_lab.explain.report import FEWER, LACKS, VERDICTS, Report, Table
from headway_lab.explain.tables import read, translation
from headway_lab.explain.topics import groups
from tests.checkpoints.shares import share
from tests.explain import toys

SAY = translation("zh")
CHINESE = re.compile(r"[\u3400-\u9fff]")
CODE = re.compile(r"[\w.]+\(.*\)( [|&] .*)?(, [\w.]+\(.*\))*")
"""The code of a declared pattern."""


def names_in(value: Any) -> Iterator[str]:
    """Yields the strings of the values that sentences are filled with."""
    if isinstance(value, str | bool):
        yield cell(value)
    elif isinstance(value, Table):
        yield from (*value.columns, *names_in(list(value.rows)))
    elif isinstance(value, dict):
        yield from (*map(str, value), *names_in(list(value.values())))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from names_in(part)


def texts_of(figure: Figure) -> Iterator[str]:
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        yield from (label.get_text() for label in axis.get_ticklabels())
    yield from (text.get_text() for text in figure.findobj(Text))  # type: ignore[attr-defined]


def drawn(topic: str, report: Report) -> Figure:
    with matplotlib.rc_context(draw.STYLE):
        figure = Figure(figsize=(8, 5))
        find_topic(topic).draw(figure, report)
    return figure


def untranslated(text: str) -> bool:
    """Returns whether a text has words that the table neither translates nor names, as a whole or line by line."""
    return any(
        not [*keys_of(line)]
        for line in ([text] if text in SAY.table else text.split("\n"))
        if re.search("[A-Za-z]{3}", line) and not line.startswith("$") and not CODE.fullmatch(line)
    )


def keys_of(text: str) -> Iterator[str]:
    """Yields the keys of the table by which a text is translated: its own, or those of its lines, or that of its
    template and those of the parts that fill it."""
    if text in SAY.table:
        yield text
        return
    if "\n" in text:
        parts = text.split("\n")
    else:
        key, match = next(((k, m) for k, p in SAY.templates.items() if (m := p.fullmatch(text))), ("", None))
        parts = [*match.groups()] if match else []
        yield from [key] if match else []
    for part in parts:
        yield from keys_of(part)


def texts_in(topic: str) -> set[str]:
    """Returns every text of a topic at toy size: names in tables, sentences and pictures, and the texts of its
    figure."""
    toy = toys.toy(topic)
    report = toy.found
    cells = [list(row.values()) for row in report.rows]
    names = {*report.columns, *names_in(cells), *names_in([*report.values.values()])}
    names |= {claim[1] for claim in report.claims if isinstance(claim, tuple)}
    names |= {*names_in(report.picture if isinstance(report.picture, Table) else report.picture.split("\n"))}
    return names | {*texts_of(drawn(topic, toy.report))}


@share("topic", TOPICS, 0, 3)
def test_every_name_has_its_translation(topic: str) -> None:
    assert {text for text in texts_in(topic) if untranslated(text)} == set()
    figure = drawn(topic, toys.toy(topic).report)
    translate(figure, SAY)
    assert any(CHINESE.search(text) for text in texts_of(figure))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_translation_is_used() -> None:
    """Every translation is used by a topic at toy size, by the fixed words of reports, or by what the code says."""
    texts = {text for topic in TOPICS for text in texts_in(topic)} | {*said_in_code()}
    texts |= {*VERDICTS, *VERDICTS.values(), *LACKS, *LACKS.values(), FEWER, *groups("en")}
    assert SAY.table.keys() - {key for text in texts for key in keys_of(text)} == set()


def said_in_code() -> Iterator[str]:
    """Yields what the code of topics, of their command and of the result pages translates or raises: the texts given to
    `say`, `fill`, `translation(language)` and ConfigError, with {} for each value of an f-string."""
    folder = Path(str(explain.__globals__["__file__"])).parent
    files = (folder.parent / "cli" / "explain.py", Path(__file__).with_name("results.py"))
    for path in (*folder.glob("*.py"), *files):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id="say" | "fill" | "ConfigError")
                    | ast.Attribute(attr="fill")
                    | ast.Call(func=ast.Name(id="translation")),
                    args=[text, *_],
                ):
                    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts
                    )


def test_groups_of_topics_are_translated() -> None:
    assert all(CHINESE.search(group) for group in groups("zh"))
    assert [[*topics] for topics in groups("zh").values()] == [[*topics] for topics in groups("en").values()]


def test_both_tables_have_the_same_keys() -> None:
    english, chinese = read("en"), dict(read("zh"))
    del chinese["labels"]

    def keys(table: Any) -> Any:
        return {key: keys(value) for key, value in table.items()} if isinstance(table, dict) else None

    assert keys(english) == keys(chinese)


def test_a_report_is_printed_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "swish", "--lang", "zh"]) == 0
    text = capsys.readouterr().out
    assert "结论：在此规模下可见（" in text
    assert "  可见  " in text
    assert "最低点 x" in text
    assert run(["explain", "--lang", "zh"]) == 0
    assert TOPICS["swish"].question not in capsys.readouterr().out


def test_errors_of_settings_are_said_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    command_lines = (
        ["swish", "--heads", "4"],
        ["scale", "--seeds", "3,3"],
        ["--quick"],
        ["all"],
        ["heads", "--heads", "1"],
    )
    for arguments in command_lines:
        assert run(["explain", *arguments, "--lang", "zh"]) == 1
        assert CHINESE.search(capsys.readouterr().err), arguments
    for arguments in (["heads", "--d", "4"], ["cache", "--context", "100"], ["all", "--n", "4"]):
        assert run(["explain", *arguments, "--lang", "zh"]) == 1
        assert arguments[0] in capsys.readouterr().err, "a name of a topic stays as it is typed"


def test_the_environment_decides_unless_a_language_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert run(["explain", "swish"]) == 0
    assert "结论" in capsys.readouterr().out
    assert run(["explain", "swish", "--lang", "en"]) == 0
    assert "verdict" in capsys.readouterr().out
    assert run(["explain", "swish", "--lang", "fr"]) == 1
    assert "explain --lang must be one of en, zh, got 'fr'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh"}, "zh"),
        ({"LANG": "zh-Hans"}, "zh"),
        ({"LANG": "zhx"}, "en"),
        ({"LANG": "zh_TW", "LC_ALL": "C"}, "en"),
        ({"LANG": "de_DE", "LC_MESSAGES": "zh_SG"}, "zh"),
        ({"LANG": "de_DE", "LC_ALL": "", "LC_MESSAGES": ""}, "en"),
    ],
)
def test_the_first_variable_that_is_set_is_read(environment: dict[str, str], language: str) -> None:
    assert language_of_environment(environment) == language


def test_a_translation_is_of_whole_texts_lines_and_templates() -> None:
    say = Translation({"a b": "甲", "{} of {}": "{1} 的 {0}", "x": "子"})
    assert say("a b") == "甲"
    assert say("a b\nother\nx") == "甲\nother\n子"
    assert say("x of a b") == "甲 的 子"
    assert say("a bc") == "a bc"
    assert Translation({})("x of y") == "x of y"


def test_chinese_takes_two_columns() -> None:
    assert [width(text) for text in ("ab", "层数", "a，", "ｂ", "±")] == [2, 4, 3, 2, 1]
    assert (padded("层", 4), padded("层", 4, right=True)) == ("层  ", "  层")
    lines = table(("层数", "n"), [("一", 1), ("ab", 22)], "").split("\n")
    assert lines == ["层数   n", "----  --", "一     1", "ab    22"]


def test_without_a_font_a_chinese_figure_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fonts, "find_spec", lambda name: None)
    monkeypatch.setattr(fonts, "CHINESE", ())
    monkeypatch.setattr(find_topic("swish"), "run", lambda **_: pytest.fail("run"))
    fonts.fonts.cache_clear()
    with pytest.raises(ConfigError, match="pip install zhplot"):
        explain("swish", tmp_path, language="zh")
    fonts.fonts.cache_clear()
    assert not any(tmp_path.iterdir())


def test_a_chinese_figure_is_set_in_a_font_that_has_its_characters(tmp_path: Path) -> None:
    report = explain("swish", tmp_path, language="zh")
    assert report.figure == tmp_path / "swish.zh.png"
    assert report.figure.stat().st_size > 10_000
    family = fonts.fonts("zh")[-1]
    path = matplotlib.font_manager.findfont(family, fallback_to_default=False)
    characters = matplotlib.font_manager.get_font(path).get_charmap()
    needed = {character for text in SAY.table.values() for character in text if CHINESE.match(character)}
    assert {character for character in needed if ord(character) not in characters} == set()
