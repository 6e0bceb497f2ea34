"""Stop strings: the same text however the stream is cut, and nothing of a stop string is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.generate import StopScanner

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Returns (text before, stop string), letter by letter: the stop string that is complete first, the longest of
    several."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


@given(st.lists(st.text("ab\n", max_size=5), max_size=8), STOPS)
def test_any_cut_gives_the_same(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for i, piece in enumerate(pieces):
        shown += scanner.push(piece)
        expected, hit = oracle("".join(pieces[: i + 1]), stops)
        assert scanner.hit == hit
        assert expected.startswith(shown)  # nothing is shown that is taken back later
    assert (shown + scanner.flush(), scanner.hit) == oracle("".join(pieces), stops)


def test_split_across_pieces() -> None:
    scanner = StopScanner(["\n\nUser:"])
    assert [scanner.push(p) for p in ("Hi", "\n", "\nUs", "er", ": more", "x")] == ["Hi", "", "", "", "", ""]
    assert scanner.hit == "\n\nUser:"
    assert scanner.flush() == ""


def test_what_is_held_back_comes_when_it_is_no_stop() -> None:
    scanner = StopScanner(["abc"])
    assert [scanner.push(p) for p in ("xab", "abd", "ab")] == ["x", "ababd", ""]
    assert scanner.flush() == "ab"


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None]])
def test_bad_stops(stops: list[str]) -> None:
    with pytest.raises(ConfigError, match="stop strings must be non-empty strings"):
        StopScanner(stops)
