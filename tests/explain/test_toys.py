"""Every topic at toy size: what it reports, what it draws, and where its verdict turns."""

import pytest

from headway_lab.explain import TOPICS
from tests.explain import toys


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_reports_and_draws_as_listed(topic: str) -> None:
    toys.check(toys.toy(topic))


def test_every_listing_is_of_a_topic() -> None:
    assert {path.stem for path in toys.LISTINGS.iterdir()} == {*TOPICS}
