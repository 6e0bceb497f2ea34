"""What is given in the place of a tensor, a pattern or a score is named, with what to give instead."""

from typing import Any

import pytest
import torch

import headway
from headway import Causal, SoftCap, Window, attend, attention_weights
from headway.errors import PatternError
from headway.patterns import parse

Q = torch.randn(1, 2, 4, 8)


@pytest.mark.parametrize("place", range(3))
def test_arrays_of_numpy_are_no_tensors(place: int) -> None:
    given: list[Any] = [Q, Q, Q]
    given[place] = Q.numpy()
    with pytest.raises(PatternError, match=r"q, k and v are torch tensors .* got ndarray; torch.as_tensor"):
        attend(*given, Causal())


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            torch.ones(4, 4, dtype=torch.bool),
            r"got a Tensor of shape \(4, 4\); a mask goes .*: keep=mask",
        ),
        (Q.numpy(), "got a ndarray of shape .* keep=mask"),
        (Causal, r"got the class Causal; give a value of it, Causal\(...\)"),
        ("Causal()", r"got a str; parse\('Causal\(\)'\) makes a pattern of it"),
        (3, "got 3 of type int"),
    ],
)
def test_what_is_no_pattern_is_named(pattern: Any, said: str) -> None:
    for call in (lambda: attend(Q, Q, Q, pattern), lambda: attention_weights(Q, Q, pattern)):
        with pytest.raises(PatternError, match=said):
            call()


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (SoftCap, "got the class SoftCap; give a value of it"),
        (2.0, "got a float"),
        ([SoftCap(3.0), 1], "got a int"),
    ],
)
def test_what_is_no_score_is_named(score: Any, said: str) -> None:
    with pytest.raises(PatternError, match=f"each step is a Score .* {said}"):
        attend(Q, Q, Q, Causal(), score=score)


def test_patterns_are_joined_with_patterns() -> None:
    with pytest.raises(
        PatternError, match=r"& joins two patterns, and beside Causal\(\) stands the class Window"
    ):
        Causal() & Window  # type: ignore[operator]
    with pytest.raises(PatternError, match=r"\| joins two patterns, and beside Window.last\(2\) stands 3"):
        Window.last(2) | 3  # type: ignore[operator]


def test_windows_end_where_positions_do() -> None:
    for text in ("Window.last(99999999999999999999999)", "Window(0, 3, 4611686018427387904)"):
        with pytest.raises(
            PatternError, match=r"positions far, and positions end at \d+; .* write Causal\(\)"
        ):
            parse(text)
    with pytest.raises(PatternError, match="Sink: a number of first tokens, 0 or more and at most"):
        parse("Sink(99999999999999999999999)")
    far = Window.last(2**62 + 1)
    assert torch.equal(attend(Q, Q, Q, far), attend(Q, Q, Q, Causal()))
    assert headway.patterns.parse(str(far)) == far
