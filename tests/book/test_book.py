"""The book: every topic has formulas that render, both languages are complete, and nothing is fetched."""

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.errors import ConfigError
from headway.language import LANGUAGES
from headway_lab import book
from headway_lab.book import SIGNS, WORDS, formula_image, report_of, write_books
from headway_lab.explain import TOPICS, find_topic, judged


def test_every_topic_has_formulas_that_render() -> None:
    for topic in TOPICS.values():
        assert topic.tex
        for tex in topic.tex:
            assert formula_image(tex).startswith("<img alt=")


def test_formulas_that_do_not_parse_are_errors() -> None:
    with pytest.raises(ValueError, match="nofunction"):
        formula_image(r"\nofunction{x}")


def book_of(out: Path, language: str, *topics: str, **options: Any) -> str:
    """Writes the book in one language and returns its page."""
    (path,) = write_books(out, topics, [language], **options)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_book_has_its_chapters_and_fetches_nothing(language: str, tmp_path: Path) -> None:
    page = book_of(tmp_path, language, "permutation", "swish")
    reports = [
        json.loads(report_of(topic, tmp_path, language).read_text()) for topic in ("permutation", "swish")
    ]
    assert f'<html lang="{language}">' in page
    assert page.count("<section") == 2
    for report in reports:
        assert WORDS[language]["seen" if report["seen"] else "not seen"] in page
        assert all(escape(text) in page for text in (report["setting"], report["finding"], *report["claims"]))
    contents = page.partition("<section")[0]
    assert [
        sign == SIGNS["seen"] for sign in re.findall(r"</a>&nbsp;<span class=\"mark[^>]*>(.)<", contents)
    ] == [report["seen"] for report in reports]
    assert page.count("<figure>") == 2
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert "http" not in page


def test_reports_that_are_there_are_not_run_again_unless_the_formula_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = book_of(tmp_path, "en", "swish")
    measure = book.measure
    monkeypatch.setattr(book, "measure", lambda *_, **options: pytest.fail("run again"))
    assert book_of(tmp_path, "en", "swish") == first
    path = report_of("swish", tmp_path, "en")
    path.write_text(path.read_text().replace("beta -> 0", "beta -> 1"))
    ran = []
    monkeypatch.setattr(
        book, "measure", lambda topic, **options: ran.append(topic) or measure(topic, **options)
    )
    book_of(tmp_path, "en", "swish")
    assert ran == ["swish"]


def test_a_topic_is_run_once_for_all_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    measure = book.measure
    monkeypatch.setattr(
        book, "measure", lambda topic, **options: ran.append(topic) or measure(topic, **options)
    )
    assert [path.name for path in write_books(tmp_path, ["swish"])] == ["en.html", "zh.html"]
    assert ran == ["swish"]
    english, chinese = (json.loads(report_of("swish", tmp_path, x).read_text()) for x in LANGUAGES)
    assert [english[name] for name in ("columns", "rows", "seen")] == [
        chinese[name] for name in ("columns", "rows", "seen")
    ]
    assert english["finding"] != chinese["finding"]


def test_a_quick_book_has_smaller_runs_where_there_are_some_and_none_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rotary-values has a smaller run, swish has none."""
    ran = []

    def fake(topic: str, *, quick: bool) -> Any:
        ran.append((topic, quick))
        return measure("swish")

    measure = book.measure
    monkeypatch.setattr(book, "measure", fake)
    monkeypatch.setattr(book, "figure_of", lambda topic, out, language: out / "swish.png")
    swish = TOPICS["swish"]
    smaller = replace(swish, quick={"few": True})
    monkeypatch.setattr(book, "TOPICS", {"swish": swish, "rotary-values": smaller})
    monkeypatch.setattr(book, "topics_in", lambda language: {"swish": swish, "rotary-values": swish})
    for quick in (True, True, False):
        book_of(tmp_path, "en", "swish", "rotary-values", quick=quick)
    assert ran == [("swish", False), ("rotary-values", True), ("rotary-values", False)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_book_has_a_mark_and_a_word_of_its_own_where_a_run_was_too_small(
    language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick runs are smaller than what is claimed, so that what they do not show is not refuted."""
    swish = find_topic("swish")
    monkeypatch.setitem(TOPICS, "swish", replace(TOPICS["swish"], quick={"few": True}))
    ours = judged(swish)
    claims = dict(zip(ours.claims, [True, False, None, *[True] * len(ours.claims)], strict=False))
    monkeypatch.setattr(swish, "run", lambda few=False: replace(ours, claims=claims))
    marks = {}
    for quick in (False, True):
        page = book_of(tmp_path / f"{quick}", language, "swish", quick=quick)
        contents, chapter = page.split("<section")
        marks[quick] = re.findall(r'<li><span class="mark ?(\w*)">(.)<', chapter)
        first = re.search(r'&nbsp;<span class="mark[^>]*>(.)<', contents)
        assert first is not None
        assert first[1] == ("?" if quick else "✗")
        assert all(f">{sign}</span> {WORDS[language][word]}" in contents for word, sign in SIGNS.items())
    assert (
        len({*SIGNS.values()}) == len({*WORDS[language].values()} & {WORDS[language][w] for w in SIGNS}) == 3
    )
    seen, refuted, unclear = ("", "✓"), ("not", "✗"), ("open", "?")
    assert marks[False][:4] == [seen, refuted, unclear, seen]
    assert marks[True][:4] == [seen, unclear, unclear, seen]


def test_each_topic_that_is_run_is_said(tmp_path: Path) -> None:
    messages: list[str] = []
    for _ in range(2):
        book_of(tmp_path, "en", "permutation", "swish", say=messages.append)
    assert messages == ["1 of 2: permutation, about 1 s of one core", "2 of 2: swish, about 1 s of one core"]


def test_another_language_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be one of en, zh"):
        book_of(tmp_path, "fr")


def test_the_command_writes_both_languages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        book, "write_books", lambda out, languages, **options: [out / f"{x}.html" for x in languages]
    )
    assert run(["explain", "all", "--out", str(tmp_path), "--lang", "en", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == [str(tmp_path / "en.html")]
    assert run(["explain", "all", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == [
        str(tmp_path / "en.html"),
        str(tmp_path / "zh.html"),
    ]
