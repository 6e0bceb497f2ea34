"""Tokens: indices, documents and marks that each constructor gives to slots, and what it refuses."""

import pytest
import torch

from headway.errors import HeadwayError, PatternError
from headway.heads import Heads
from headway.patterns import Full, visible
from headway.tokens import Tokens


def test_constructors() -> None:
    at = Tokens.range(3, start=2)
    assert (at.index.tolist(), at.start, at.rows, at.count) == ([[2, 3, 4]], 2, 1, 3)
    left, right = (Tokens.from_lengths([3, 1], side=side) for side in ("left", "right"))
    assert left.index.tolist() == [[0, 1, 2], [-1, -1, 0]]
    assert right.index.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert left.start is None
    assert Tokens.from_lengths([3, 3]).start == 0
    for mask in (
        [[0, 1, 1], [1, 1, 0]],
        [[False, True, True], [True, True, False]],
        [[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]],
    ):
        assert Tokens.from_attention_mask(torch.tensor(mask)).index.tolist() == [[-1, 0, 1], [0, 1, -1]]
    packed = Tokens.packed([[2, 1], [3]], total=4)
    assert packed.index.tolist() == [[0, 1, 0, -1], [0, 1, 2, -1]]
    assert packed.documents.tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]
    assert Tokens.packed([2, 2]).index.tolist() == [[0, 1, 0, 1]]
    assert Tokens.packed([4]).start == 0


@pytest.mark.parametrize("lengths", [[2.5, 1.0], [True, True]])
def test_lengths_that_are_no_whole_numbers_are_refused(lengths: list[float]) -> None:
    with pytest.raises(PatternError, match="lengths must be whole numbers"):
        Tokens.from_lengths(lengths)  # type: ignore[arg-type]


def test_documents_never_see_each_other_and_nothing_sees_padding() -> None:
    at = Tokens.packed([[2, 1]], total=4)
    assert visible(Full(), at, at)[0, 0].int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 0],
    ]


def test_slots_can_be_taken_and_joined() -> None:
    at = Tokens.range(6).with_global([0, 4]).with_position(torch.arange(10, 16).unsqueeze(0))
    part = at.slice(2, 5)
    assert (part.start, part.index.tolist(), part.globals.tolist()) == (
        2,
        [[2, 3, 4]],
        [[False, False, True]],
    )
    assert part.positions.tolist() == [[12, 13, 14]]
    again = Tokens.cat([at.slice(0, 2), at.slice(2, 6)])
    assert again.start == 0
    assert torch.equal(again.index, at.index)
    assert torch.equal(again.globals, at.globals)
    assert Tokens.cat([at.slice(0, 2), at.slice(3, 6)]).start is None
    picked = at.gather(torch.tensor([[5, 0], [1, 2]]))
    assert picked.index.tolist() == [[5, 0], [1, 2]]
    assert picked.globals.tolist() == [[False, True], [False, False]]
    rows = Tokens.from_lengths([1, 2]).select_rows(torch.tensor([1, 1, 0]))
    assert rows.index.tolist() == [[0, 1], [0, 1], [0, -1]]


def test_global_tokens_by_index_and_by_mask() -> None:
    ragged = Tokens.from_lengths([3, 2], side="left")
    assert ragged.with_global([0]).globals.tolist() == [[True, False, False], [False, True, False]]
    assert ragged.with_global([[2], [0, 1]]).globals.tolist() == [[False, False, True], [False, True, True]]
    with pytest.raises(PatternError, match="row 1 has no token with index 2"):
        ragged.with_global([2])
    with pytest.raises(PatternError, match="marks empty slots"):
        ragged.with_global(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(PatternError, match=r"must be bool \[rows, slots\] = \[2, 3\], got torch.int64"):
        ragged.with_global(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(PatternError, match="3 lists of indices for 2 rows"):
        ragged.with_global([[0], [0], [0]])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Tokens.from_attention_mask(torch.ones(3)), r"must have shape \[batch, slots\], got \(3,\)"),
        (lambda: Tokens.from_attention_mask(torch.ones(1, 1, 3, 3)), "as keep= of attend"),
        (
            lambda: Tokens.from_attention_mask(torch.tensor([[0.0, float("-inf")]])),
            "pass an additive mask .* as mask == 0",
        ),
        (lambda: Tokens.from_attention_mask(torch.tensor([[2, 1]])), r"must hold only 0 \(padding\) and 1"),
        (lambda: Tokens.from_lengths([3, 5], total=4), r"must lie in 0..4, got \[3, 5\]"),
        (lambda: Tokens.from_lengths([-1]), "must lie in"),
        (lambda: Tokens.from_lengths([]), r"lengths must be \[rows\], got shape \(0,\)"),
        (lambda: Tokens.from_lengths([1], side="top"), "there is no side 'top'; there are left, right"),
        (lambda: Tokens.packed([[2, 3]], total=4), "row 0 needs 5 slots, but total is 4"),
        (lambda: Tokens.packed([[-2]]), "must be 0 or more"),
        (lambda: Tokens.range(3).with_position(torch.zeros(1, 3)), "positions must be integers"),
        (
            lambda: Tokens.range(3).with_position(torch.zeros(1, 4, dtype=torch.int64)),
            "position describes 4 slots",
        ),
        (lambda: Heads.of(8, 3), r"8 query heads cannot share 3 .* one of \[1, 2, 4, 8\]"),
        (lambda: Heads.of(4, 8), "4 query heads cannot share 8"),
        (lambda: Heads.of(0, 2), "0 query heads cannot share 2 .*; heads must be at least 1"),
        (
            lambda: Tokens.range(4).with_global(torch.ones(1, 5, dtype=torch.bool)),
            r"\[1, 4\], got torch.bool \(1, 5\)",
        ),
        (
            lambda: Tokens.from_lengths([4, 3]).with_global(torch.zeros(3, 4, dtype=torch.bool)),
            r"\[2, 4\], got torch.bool \(3, 4\)",
        ),
        (lambda: Heads(0), "at least 1"),
    ],
)
def test_bad_tokens(make, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(HeadwayError, match=text):
        make()


def test_heads() -> None:
    assert [Heads.of(8, k).kind for k in (8, 4, 1)] == ["MHA", "GQA", "MQA"]
    assert Heads.of(8, 4) == Heads(4, 2)
    assert Heads.of(8).query_heads == 8
