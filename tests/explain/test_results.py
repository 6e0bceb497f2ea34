"""docs/results/explain*.md, by `tests.explain.results`, have every topic with the claims that its code makes."""

import ast
import inspect
import re
from functools import cache

import pytest

from headway_lab.explain import GROUPS, TOPICS, find_topic
from headway_lab.explain.contests import CONTESTS
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
    """Regular expressions of the claims in a topic's code: anything where the run puts a number or a name. Where claims
    are looked up, as the laws of rotary-identity, what is looked up: every text that stands in a tuple."""
    if topic in CONTESTS:
        return [re.escape(claim) for claim in CONTESTS[topic].claims]
    tree, keys = ast.parse(inspect.getsource(find_topic(topic))), []
    for node in ast.walk(tree):
        assigned = isinstance(node, ast.Assign) and any(
            getattr(t, "id", "") == "claims" for t in node.targets
        )
        if assigned or (isinstance(node, ast.keyword) and node.arg == "claims"):
            for one in ast.walk(node.value):  # type: ignore[attr-defined]
                keys += (
                    one.keys
                    if isinstance(one, ast.Dict)
                    else [one.key]
                    if isinstance(one, ast.DictComp)
                    else []
                )
    if any(isinstance(key, ast.Subscript) for key in keys):
        keys += [one.elts[0] for one in ast.walk(tree) if isinstance(one, ast.Tuple) and len(one.elts) == 3]
    texts = [
        key for key in keys if isinstance(getattr(key, "value", None), str) or isinstance(key, ast.JoinedStr)
    ]
    return ["".join(regular(part) for part in getattr(key, "values", [key])) for key in texts]


def regular(part: ast.expr) -> str:
    """What a part of a text matches."""
    return re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+"


def test_the_pages_have_every_topic_in_its_order() -> None:
    assert list(sections()) == [
        topic for name in PAGES for group in groups_of(name) for topic in GROUPS[group]
    ]
    assert set(sections()) == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_told_with_its_question_and_the_claims_of_its_code(topic: str) -> None:
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
