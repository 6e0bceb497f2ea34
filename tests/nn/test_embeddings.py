"""Embeddings of ids and of positions (row 34, and positions that are added)."""

import math

import pytest
import torch

from headway.models import ModelSpec, build
from headway.nn import PositionEmbedding, TokenEmbedding
from headway.positions import Learned, NoPositions, PositionScheme, Rotary, Sinusoidal
from headway.tokens import Tokens

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def test_ids_pick_rows() -> None:
    embed = TokenEmbedding(11, WIDTH)
    ids = torch.tensor([[3, 0, 10], [1, 1, 2]])
    assert torch.equal(embed(ids), embed.weight[ids])
    assert torch.equal(embed(ids.int()), embed.weight[ids])


def test_ids_of_empty_slots_are_not_looked_at() -> None:
    embed = TokenEmbedding(11, WIDTH)
    ids = torch.tensor([[3, 4, -100], [99, 1, 2]])
    tokens = Tokens.from_attention_mask(torch.tensor([[1, 1, 0], [0, 1, 1]]))
    assert torch.equal(embed(ids, tokens)[tokens.valid], embed.weight[ids[tokens.valid]])
    with pytest.raises(ValueError, match=r"token id -100 \(row 0, slot 2, and 1 more\) is not in 0\.\.10"):
        embed(ids)


@pytest.mark.parametrize("offset", [0, 2])
def test_a_learned_table_is_added_row_by_position(offset: int) -> None:
    positions = PositionEmbedding(Learned(6, offset), WIDTH)
    assert positions.weight is not None
    assert positions.weight.shape == (6 + offset, WIDTH)
    tokens = Tokens.from_lengths([5, 3], side="left")
    actual = positions(X, tokens)
    assert torch.equal(actual[0], X[0] + positions.weight[offset : offset + 5])
    assert torch.equal(actual[1, 2:], X[1, 2:] + positions.weight[offset : offset + 3])
    moved = Tokens.range(5).with_position(torch.tensor([[5, 0, 1, 1, 3]]))
    assert torch.equal(positions(X, moved), X + positions.weight[torch.tensor([5, 0, 1, 1, 3]) + offset])
    with pytest.raises(ValueError, match=r"positions 0\.\.7 do not fit a table for positions 0\.\.5"):
        positions(torch.zeros(1, 8, WIDTH), Tokens.range(8))


def test_sinusoids_are_added_by_position() -> None:
    positions = PositionEmbedding(Sinusoidal(100.0), WIDTH).double()
    assert not list(positions.parameters())
    actual = positions(X.double(), Tokens.range(5, start=7)) - X.double()
    angles = torch.arange(7, 12, dtype=torch.float64)[:, None] / 100.0 ** (torch.arange(0, 8, 2).double() / 8)
    assert torch.allclose(actual[..., 0::2], angles.sin(), rtol=0, atol=1e-14)
    assert torch.allclose(actual[..., 1::2], angles.cos(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("scheme", [NoPositions(), Rotary(pairing="halves")], ids=str)
def test_other_schemes_add_nothing(scheme: PositionScheme) -> None:
    positions = PositionEmbedding(scheme, WIDTH)
    assert not list(positions.parameters())
    assert positions(X, Tokens.range(5)) is X


@torch.no_grad()
def test_positions_reach_the_model() -> None:
    """Rotary only sees differences of positions, additive schemes see positions, none sees neither."""
    ids = torch.tensor([[1, 5, 2, 5, 7]])
    base = Tokens.range(5)
    moved, spread = base.with_position(base.index + 9), base.with_position(base.index * 2)
    schemes: dict[PositionScheme, tuple[bool, bool]] = {
        Rotary(100.0, pairing="halves"): (True, False),
        Learned(32): (False, False),
        Sinusoidal(): (False, False),
        NoPositions(): (True, True),
    }
    for scheme, expected in schemes.items():
        fields = {"positions": scheme, "context": 32, "init_std": 0.3}
        model = build(ModelSpec.of_depth(2, 11, **fields), seed=0, dtype=torch.float64)
        plain = model(ids)
        unchanged = tuple(
            torch.allclose(model(ids, tokens=t), plain, rtol=0, atol=1e-9) for t in (moved, spread)
        )
        assert unchanged == expected, scheme


def _published(kind: str, position: int, width: int) -> list[float]:
    """Returns the row of a position as its authors' code computes it, number by number."""
    angles = [position * math.exp(-math.log(10000.0) / width * 2 * i) for i in range(width // 2)]
    if kind == "vaswani":
        return [f(angle) for angle in angles for f in (math.sin, math.cos)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


@pytest.mark.parametrize(
    ("kind", "scheme"), [("vaswani", Sinusoidal()), ("marian", Sinusoidal(pairing="halves"))]
)
def test_sinusoids_are_those_that_were_published(kind: str, scheme: Sinusoidal) -> None:
    for width in (4, 10, 64):
        expected = torch.tensor([_published(kind, p, width) for p in range(200)], dtype=torch.float64)
        actual = scheme.embedding(torch.arange(200), width, torch.float64)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
