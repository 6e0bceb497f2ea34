"""docs/results/explain*.md, written by `tests.explain.results`, have every topic with its claims in both languages, and
the quoted verdicts are theirs."""

import re
from functools import cache
from string import Formatter

import pytest

from headway.language import LANGUAGES
from headway_lab.explain import GROUPS, TOPICS
from headway_lab.explain.topics import groups, topics_in
from headway_lab.questions import entries
from tests.explain.results import COUNTS, PAGES, WORDS, groups_of, page_of


def text_of(name: str, language: str) -> str:
    return page_of(name, language).read_text(encoding="utf-8")


def told(text: str, language: str) -> list[tuple[str, str]]:
    """Returns the word and the text of every claim on a page."""
    words = "|".join(WORDS[language].values())
    return re.findall(rf"^- ({words}): (.+)$", text, re.MULTILINE)


@cache
def sections(language: str) -> dict[str, str]:
    """Returns each topic's section of the pages."""
    by_topic = {}
    names = dict(zip(GROUPS, groups(language), strict=True))
    for name in PAGES:
        text = text_of(name, language)
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [names[group] for group in groups_of(name)]
        parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
        by_topic |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return by_topic


def claims_of(topic: str, language: str) -> list[str]:
    """Returns regular expressions of a topic's claims, with .+ for each number or name that the run fills in."""
    return [
        "".join(re.escape(text) + ".+" * (name is not None) for text, name, *_ in Formatter().parse(claim))
        for claim in topics_in(language)[topic].claims.values()
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_pages_have_every_topic_in_its_order(language: str) -> None:
    assert list(sections(language)) == [
        topic for name in PAGES for group in groups_of(name) for topic in GROUPS[group]
    ]
    assert set(sections(language)) == set(TOPICS)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_told_with_its_question_and_its_claims(topic: str, language: str) -> None:
    text, patterns = sections(language)[topic], claims_of(topic, language)
    claims = [claim for _, claim in told(text, language)]
    assert topics_in(language)[topic].question in text
    assert claims
    assert patterns
    unmade = [claim for claim in claims if not any(re.fullmatch(pattern, claim) for pattern in patterns)]
    untold = [pattern for pattern in patterns if not any(re.fullmatch(pattern, claim) for claim in claims)]
    assert not unmade + untold


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", PAGES)
def test_counts_are_those_of_the_claims(name: str, language: str) -> None:
    text = text_of(name, language)
    words = [word for word, _ in told(text, language)]
    seen = words.count(WORDS[language][True])
    assert COUNTS[language].format(all=len(words), seen=seen) in text


@pytest.mark.parametrize("topic", TOPICS)
def test_both_languages_have_one_run(topic: str) -> None:
    """The same claims are seen, and the tables have the same numbers."""
    english, chinese = (sections(language)[topic] for language in LANGUAGES)
    signs = [
        [word == WORDS[language][True] for word, _ in told(text, language)]
        for text, language in ((english, "en"), (chinese, "zh"))
    ]
    assert signs[0] == signs[1]
    rows = [re.findall(r"^\|.*\|$", text, re.MULTILINE) for text in (english, chinese)]
    numbers = [[re.findall(r"[-+]?\d[\d.e+-]*", row) for row in table[2:]] for table in rows]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_verdict_that_is_quoted_is_that_of_the_page(language: str) -> None:
    """`headway explain --question` quotes setting and finding as the page has them."""
    quoted = {entry.topic: entry.verdict for entry in entries(language)}
    for topic, text in sections(language).items():
        sentence = text.split("\n- ")[-1].split("\n\n")[1]
        assert without_signs(sentence) in without_signs(quoted[topic]), topic


def without_signs(sentence: str) -> str:
    """Returns a sentence without the signs that set its setting apart: a page has a colon, a verdict brackets."""
    return " ".join(re.findall(r"[^\s().:。：（）]+", sentence))
