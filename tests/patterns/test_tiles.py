"""Extents of tiles equal bounds computed from every slot, and leaves judge tiles from them."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.patterns import (
    Causal,
    Chunk,
    Extent,
    Full,
    GlobalKeys,
    GlobalQueries,
    Pattern,
    Sink,
    Window,
    classify,
    visible,
)
from headway.tokens import Tokens
from tests.strategies import tokens

sizes = st.sampled_from([1, 2, 3, 8, 64])
sides = st.one_of(
    tokens(st.integers(0, 40)), tokens(st.integers(0, 40)).map(lambda at: at.with_global(at.valid))
)
FIELDS = ("lo", "hi", "document_lo", "document_hi", "any_global", "all_global", "any_token", "all_tokens")
RESIDUES = ("residue_lo", "residue_hi")
LEAVES = [
    *(Full(), Causal(), Sink(3), GlobalKeys(), GlobalQueries(), Chunk(3), Chunk(8)),
    *(Window(0), Window(5), Window(0, 4), Window(3, 2)),
]


def naive(at: Tokens, tile: int, step: int) -> list[list[dict[str, int | bool] | None]]:
    """Returns the value of each field for every row and tile; None if the tile has no token."""
    at = at.expand(at.rows)
    rows = []
    for b in range(at.rows):
        row: list[dict[str, int | bool] | None] = []
        for begin in range(0, at.count, tile):
            slots = range(begin, min(begin + tile, at.count))
            index = [i for s in slots if (i := int(at.index[b, s])) >= 0]
            document = [int(at.documents[b, s]) for s in slots if at.index[b, s] >= 0]
            marks = [bool(at.globals[b, s]) for s in slots if at.index[b, s] >= 0]
            residue = [i % step for i in index]
            if not index:
                row.append(None)
                continue
            values = (min(index), max(index), min(document), max(document), any(marks), all(marks))
            ends = (True, len(index) == len(slots), min(residue), max(residue))
            row.append(dict(zip(FIELDS + RESIDUES, values + ends, strict=True)))
        rows.append(row)
    return rows


@given(sides, sizes, st.integers(1, 3))
def test_extents_are_the_bounds_over_the_tokens_of_each_tile(at: Tokens, tile: int, step: int) -> None:
    known = at.start is not None and at.is_global is None
    extent = Extent.of(at, tile, step).map(lambda t: t.expand(at.rows, -1))
    expected = naive(at, tile, step)
    assert extent.lo.shape == (at.rows, -(-at.count // tile))
    for b, row in enumerate(expected):
        for t, fields in enumerate(row):
            if fields is None:
                for name in ("any_token", "all_tokens", "any_global", "all_global"):
                    assert not getattr(extent, name)[b, t], name
                assert extent.lo[b, t] > extent.hi[b, t]
                continue
            for name in FIELDS if known else FIELDS + RESIDUES:
                assert getattr(extent, name)[b, t] == fields[name], name
            assert extent.residue_lo[b, t] <= fields["residue_lo"] <= fields["residue_hi"]
            assert fields["residue_hi"] <= extent.residue_hi[b, t]


@given(sides, sizes, sizes, st.integers(1, 3))
def test_groups_of_tiles_joined_are_the_wider_tiles(at: Tokens, tile: int, count: int, step: int) -> None:
    joined = Extent.of(at, tile, step).grouped(count).joined()
    wide = Extent.of(at, tile * count, step)
    for name in FIELDS + RESIDUES:
        assert torch.equal(getattr(joined, name), getattr(wide, name)), name


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_leaves_judge_tiles_of_neighbours_exactly(leaf: Pattern) -> None:
    """For contiguous indices, a tile is possible exactly if some of its pairs is visible, and certain exactly if all
    are."""
    marks = torch.arange(30)[None] % 7 < 2
    for ahead, q_tile, k_tile in itertools.product((0, 1, 6, 29), (1, 2, 3, 8), (1, 2, 4, 8)):
        q, k = Tokens.range(30, start=ahead).with_global(marks), Tokens.range(30).with_global(marks)
        truth = visible(leaf, q, k)[0, 0]
        tiles = [rows.split(k_tile, 1) for rows in truth.split(q_tile)]
        possible, certain = (t[0].tolist() for t in classify(leaf, q, k, q_tile, k_tile))
        assert possible == [[bool(t.any()) for t in row] for row in tiles], (ahead, q_tile, k_tile)
        assert certain == [[bool(t.all()) for t in row] for row in tiles], (ahead, q_tile, k_tile)


@pytest.mark.parametrize("step", [2, 3])
def test_a_dilated_window_judges_slots_exactly(step: int) -> None:
    """Tiles of a single slot have a known residue."""
    window = Window(3, 2, step)
    q, k = (Tokens.range(40).gather(torch.randperm(40).unsqueeze(0)) for _ in "qk")
    truth = visible(window, q, k)[:, 0]
    for judged in classify(window, q, k, 1, 1):
        assert torch.equal(judged, truth)


def test_documents_keep_all_their_bits() -> None:
    """Ids that agree in their lower 32 bits are different documents."""
    ids = torch.tensor([[1, 1 + 2**32, 1, 1]])
    extent = Extent.of(Tokens(torch.tensor([[0, 0, 1, 2]]), document=ids), 2)
    assert extent.document_lo.tolist() == [[1, 1]]
    assert extent.document_hi.tolist() == [[1 + 2**32, 1]]
