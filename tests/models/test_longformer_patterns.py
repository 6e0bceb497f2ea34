"""Longformer's claims, rows 94, 96, 103 and 105: windows, dilation and global tokens by layer and by head are what
they are defined to be, and cost no parameters."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.models import cost
from headway.patterns import Full, Global, Pattern, PerHead, Window
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.models.longformer_rows import EXACT, HEADS, encoder, ids, made

Side = tuple[int, int, int]  # before, after, step
LAYERS: list[list[list[Side]]] = [
    [[(2, 2, 1)] * HEADS, [(4, 4, 1)] * HEADS, [(7, 7, 1)] * HEADS],
    [[(2, 2, 1)] * HEADS, [(2, 2, 2)] * HEADS, [(2, 2, 4)] * HEADS],
    [[(2, 2, 1), (2, 2, 1), (2, 2, 3), (1, 1, 5)], [(3, 0, 1), (0, 3, 2), (5, 5, 1), (1, 2, 3)]],
]


def pattern_of(heads: list[Side]) -> Pattern:
    """One layer: the same window in all heads, or a window for each (row 103: dilation by head)."""
    windows = [Window(*side) for side in heads]
    return (windows[0] if len(set(heads)) == 1 else PerHead(*windows)) | Global()


def by_hand(layer: Any, heads: list[Side], real: Tensor, glob: Tensor, x: Tensor) -> Tensor:
    """[B, T, M] -> [B, T, M], from the definition: scores of all pairs in float64, of which some are kept."""
    count = x.shape[1]
    away = torch.arange(count) - torch.arange(count)[:, None]
    near = torch.stack(
        [(away >= -b * s) & (away <= a * s) & (away % s == 0) for b, a, s in heads]
    )  # [H, T, T]
    seen = (near | glob[:, None, None, :]) & real[:, None, None, :]

    def attended(q: Any, k: Any, v: Any, mask: Tensor) -> Tensor:
        a, b, c = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (q, k, v))
        scores = (a @ b.mT * a.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)  # padding sees nothing
        out: Tensor = (weights @ c).transpose(1, 2).flatten(2)
        return out

    local = attended(layer.q_proj, layer.k_proj, layer.v_proj, seen)
    everything = real[:, None, None, :].expand_as(seen)
    wide = attended(layer.q_global_proj, layer.k_global_proj, layer.v_global_proj, everything)
    y: Tensor = layer.o_proj(torch.where(glob.unsqueeze(-1), wide, local))
    return y


@pytest.mark.parametrize("marked", [[[], []], [[0], [0, 3, 11]], [[5], []]], ids=str)
@pytest.mark.parametrize("layers", LAYERS, ids=["windows", "dilations", "by head"])
def test_rows_96_and_103_an_encoder_is_its_definition(
    layers: list[list[Side]], marked: list[list[int]]
) -> None:
    """Windows and dilations by layer and by head, with global tokens that differ from row to row."""
    model = made(encoder([pattern_of(heads) for heads in layers], len(layers)))
    tokens = Tokens.from_lengths([20, 13]).with_global(marked)
    real, row = tokens.valid, ids(2, 20)
    with torch.no_grad():
        found = model(row, tokens=tokens)[real]
        for block, heads in zip(model.model.blocks, layers, strict=True):
            layer = block.self_attn

            def shown(x: Tensor, *, layer: Any = layer, heads: Any = heads, **_: Any) -> Tensor:
                return by_hand(layer, heads, real, tokens.globals, x)

            layer.forward = shown  # type: ignore[method-assign,assignment]
        expected = model(row, tokens=tokens)[real]
    assert off(found, expected) < EXACT


def test_row_103_each_layer_sees_by_its_own_pattern() -> None:
    patterns = [pattern_of(heads) for heads in LAYERS[0]]
    other = encoder([patterns[1], patterns[0], patterns[2]], 3)
    one, two = made(encoder(patterns, 3)), made(other)
    with torch.no_grad():
        assert off(one(ids(1, 20)), two(ids(1, 20))) > 1e-3


@pytest.mark.parametrize("window", [19, 20, 60])
def test_row_94_a_window_that_reaches_all_is_full(window: int) -> None:
    row = ids(2, 20)
    with torch.no_grad():
        full, near = (made(encoder(p))(row) for p in (Full(), Window.around(window) | Global()))
        assert off(near, full) < EXACT
        assert off(made(encoder(Window.around(18)))(row), full) > 1e-6


def test_row_105_one_state_dict_in_all_patterns() -> None:
    patterns = [
        Full(), Window.around(3), Window.around(3, step=2), Window.around(3) | Global(), Full() | Global(),
        PerHead(*(Window.around(i) for i in range(HEADS))) | Global(),
    ]  # fmt: skip
    base = made(encoder(Full()))
    seen = []
    for pattern in patterns:
        spec = base.spec.with_patterns(pattern)
        assert (
            cost.parameter_count(spec)
            == cost.parameter_count(base.spec)
            == sum(p.numel() for p in base.parameters())
        )
        model = made(spec)
        model.load_state_dict(base.state_dict())
        with torch.no_grad():
            seen.append(model(ids(1, 20)))
    assert all(off(a, b) > 1e-6 for a, b in itertools.combinations([seen[0], *seen[1:3], seen[5]], 2))
    assert off(seen[4], seen[0]) < EXACT
