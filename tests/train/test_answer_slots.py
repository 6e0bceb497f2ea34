"""Answer slots: the tokens that hold a character of an answer, if the window holds all of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.text.template import Encoded
from headway.train.tasks.answer import slots_of

QUESTION = [None, (0, 3), (4, 9), None]


def window(*context: tuple[int, int] | None) -> Encoded:
    """Returns a question of two tokens and the tokens of a context, between tokens of the template."""
    offsets = [*QUESTION, *context, None]
    texts = [None, 0, 0, None, *(None if offset is None else 1 for offset in context), None]
    return Encoded([1] * len(offsets), [0] * len(offsets), offsets, texts)


@pytest.mark.parametrize(
    ("place", "slots"),
    [
        ((10, 14), [(4, 4)]),
        ((10, 15), [(4, 4)]),  # the space is in no token
        ((10, 16), [(4, 5)]),
        ((13, 16), [(4, 5)]),
        ((14, 16), [(5, 5)]),
        ((14, 15), []),  # only a space
        ((15, 30), [(5, 6)]),
        ((9, 14), []),  # begins before the window
        ((15, 31), []),  # ends after it
        ((0, 3), []),  # characters of the question do not count
        ((11, 12), [(4, 4)]),
    ],
)
def test_slots_of_a_place(place: tuple[int, int], slots: list[tuple[int, int]]) -> None:
    assert slots_of(window((10, 14), (15, 20), (20, 30)), [place]) == slots


def test_places_stand_in_their_order_and_a_window_without_context_has_none() -> None:
    text = window((0, 4), (4, 8))
    assert slots_of(text, [(5, 6), (9, 10), (0, 8)]) == [(5, 5), (4, 5)]
    assert slots_of(window(), [(0, 1)]) == []
    assert slots_of(text, []) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.data())
def test_slots_are_those_that_have_a_character_of_the_place(lengths: list[int], data: st.DataObject) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    offsets = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    start = data.draw(st.integers(0, ends[-1] - 1))
    stop = data.draw(st.integers(start + 1, ends[-1]))
    slots = [
        slot
        for slot, (low, high) in enumerate(offsets, start=4)
        if {*range(low, high)} & {*range(start, stop)}
    ]
    assert slots_of(window(*offsets), [(start, stop)]) == [(slots[0], slots[-1])]
