"""Empty batches, and positions that a learned table lacks, that were never trained, or that are no integers."""

import pytest
import torch

from headway.models import ModelSpec, build
from headway.patterns import Causal, Sink, Window
from headway.positions import DynamicNTK, Learned, PositionScheme, Rotary, Sinusoidal
from headway.tokens import Tokens

VOCAB = 29
SCHEMES: dict[str, PositionScheme] = {
    "rotary": Rotary(100.0, pairing="halves"),
    "dynamic": Rotary(100.0, pairing="halves", scaling=DynamicNTK(2.0, 8)),
    "learned": Learned(16),
    "sinusoidal": Sinusoidal(),
}


def spec_of(scheme: str) -> ModelSpec:
    patterns = (Window.last(4) | (Causal() & Sink(1)), Causal())
    return ModelSpec.of_depth(
        2, VOCAB, width=32, heads=4, kv_heads=2, head_dim=8, hidden=24, context=16, patterns=patterns,
        positions=SCHEMES[scheme], init_std=0.3,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(1, 0), (0, 5), (0, 0)], ids=str)
def test_a_batch_of_nothing_gives_nothing_and_no_gradient(scheme: str, shape: tuple[int, int]) -> None:
    model = build(spec_of(scheme), seed=0)
    ids = torch.zeros(shape, dtype=torch.int64)
    logits = model(ids)
    assert logits.shape == (*shape, VOCAB)
    logits.sum().backward()
    assert not any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        cache = model.make_cache(shape[0])
        assert model(ids, cache=cache).shape == (*shape, VOCAB)
        assert cache.lengths == (shape[1],) * shape[0]


@pytest.mark.parametrize("bad", [16, 10**6, -1])
def test_a_position_that_a_learned_table_lacks_is_named(bad: int) -> None:
    model, ids = build(spec_of("learned"), seed=0), torch.zeros(1, 3, dtype=torch.int64)
    tokens = Tokens.range(3).with_position(torch.tensor([[0, bad, 2]]))
    low, high = min(bad, 0), max(bad, 2)
    with pytest.raises(
        ValueError, match=rf"positions {low}\.\.{high} do not fit a table for positions 0\.\.15"
    ):
        model(ids, tokens=tokens)


@torch.no_grad()
def test_rotary_takes_any_position_before_0_and_beyond_what_was_trained() -> None:
    """Only differences of positions matter, however far they are from 0."""
    model, ids = build(spec_of("rotary"), seed=0, dtype=torch.float64), torch.randint(VOCAB, (1, 9))
    base = Tokens.range(9)
    for shift in (-5, -100_000, 16, 100_000):
        moved = model(ids, tokens=base.with_position(base.index + shift))
        torch.testing.assert_close(moved, model(ids), rtol=0, atol=1e-9)
    spread = base.with_position(base.index * 1000)
    assert (model(ids, tokens=spread) - model(ids)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_positions_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=rf"positions must be integers \[rows, slots\], got {dtype} \(1, 3\)"
    ):
        Tokens.range(3).with_position(torch.zeros(1, 3, dtype=dtype))
