"""docs/results/explain*.md, by `tests.explain.results`, have every topic with the claims that it makes."""

import re
from functools import cache
from string import Formatter

import pytest

from headway_lab.explain import GROUPS, TOPICS
from tests.explain.results import PAGES, RESULTS, groups_of

CLAIM = re.compile(r"^- (seen|NOT seen): (.+)$", re.MULTILINE)


@cache
def sections() -> dict[str, str]:
    """What the pages say of each topic."""
    found = {}
    for name in PAGES:
        text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == groups_of(name)
        parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


def claims_of(topic: str) -> list[str]:
    """Regular expressions of a topic's claims: anything where the run puts a number or a name."""
    return [
        "".join(re.escape(text) + ".+" * (name is not None) for text, name, *_ in Formatter().parse(claim))
        for claim in TOPICS[topic].claims.values()
    ]


def test_the_pages_have_every_topic_in_its_order() -> None:
    assert list(sections()) == [
        topic for name in PAGES for group in groups_of(name) for topic in GROUPS[group]
    ]
    assert set(sections()) == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_told_with_its_question_and_its_claims(topic: str) -> None:
    text, made = sections()[topic], claims_of(topic)
    claims = [claim for _, claim in CLAIM.findall(text)]
    assert TOPICS[topic].question in text
    assert claims
    assert made
    unmade = [claim for claim in claims if not any(re.fullmatch(pattern, claim) for pattern in made)]
    untold = [pattern for pattern in made if not any(re.fullmatch(pattern, claim) for claim in claims)]
    assert not unmade + untold


def test_counts_are_those_of_the_claims() -> None:
    for name in PAGES:
        text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        words = [word for word, _ in CLAIM.findall(text)]
        assert f"Of {len(words)} claims {words.count('seen')} were seen" in text
