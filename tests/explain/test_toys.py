"""Every topic at toy size: its report, its figure, where its verdict turns, and its sentences."""

import re
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest

from headway_lab.explain import TOPICS, topics
from headway_lab.explain.report import Report
from headway_lab.explain.runs import Budget
from headway_lab.explain.spread import Gap
from headway_lab.explain.topics import Topic
from tests.explain import toys


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_reports_and_draws_as_listed(topic: str) -> None:
    toys.check(toys.toy(topic))


def test_every_listing_is_of_a_topic() -> None:
    assert {path.stem for path in toys.LISTINGS.iterdir()} == {*TOPICS}


LANGUAGES = [path.stem for path in Path(topics.__file__).parent.glob("*.toml") if path.stem != "topics"]


def names_in(text: str) -> set[str]:
    """Returns the names that a template fills in."""
    return {re.split(r"[.\[]", name)[0] for _, name, *_ in Formatter().parse(text) if name}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("topic", TOPICS)
def test_every_claim_has_its_sentence_and_every_sentence_is_used(topic: str, language: str) -> None:
    toy = toys.toy(topic)
    (sentences,) = (group[topic] for group in topics.groups(language).values() if topic in group)
    assert {key if isinstance(key, str) else key[0] for key in toy.found.claims} == {*sentences.claims}
    report = sentences.told(topic, toy.found, **toy.known)
    texts = [report.setting, report.finding, report.picture, *map(str, report.claims)]
    assert len(report.claims) == len(toy.found.claims)
    assert all(texts[:2])
    assert not any(re.search(r"[{}]|\bGap\(|\bNone\b", text) for text in texts)


@pytest.mark.parametrize("topic", TOPICS)
def test_every_value_is_put_into_a_sentence(topic: str) -> None:
    sentences = TOPICS[topic]
    templates = (sentences.setting, sentences.finding, sentences.picture, *sentences.claims.values())
    assert {*toys.toy(topic).found.values} <= set().union(*map(names_in, templates))


def test_a_sentence_lists_what_it_is_given() -> None:
    topic = Topic("", "", "", "", {}, TOPICS["scale"].phrases)

    def told(template: str, **values: object) -> str:
        report = Report(rows=({"n": 1}, {"n": 2.5}), claims={}, values=values)
        return replace(topic, finding=template).told("", report, LEAST=3).finding

    assert (
        told("{share:.0%}, {first[n]} to {last[n]:g} in {count}, {LEAST}", share=0.5)
        == "50%, 1 to 2.5 in 2, 3"
    )
    assert told("{some:.1f}", some=[1, 2.25]) == "1.0, 2.2"
    assert told("{some}", some=("rotary, window", "none")) == "rotary, window; none"
    assert told("{some:.0f}", some={"a": 1.0, "b": 2.0}) == "a 1, b 2"
    assert told("{some}", some=[]) == "none"
    assert told("{some}", some={"a": Gap(-0.05, 0.1)}) == "a -0.050 ± 0.100, too small to tell"
    assert told("{some}", some=Gap(0.05, 0.01)) == "+0.050 ± 0.010, seen"
    assert told("{some.factor}", some=Gap(0.0, 0.7)) == "1 (0.5 to 2)"
    assert told("{some}", some=Budget(steps=3)).startswith("3 steps of 8 x 64 bytes of Python's")
    with pytest.raises(KeyError, match="other"):
        told("{other}")
