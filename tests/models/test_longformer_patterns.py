"""Longformer's claims, rows 94, 96, 103 and 105: windows, dilation and global tokens by layer and by head follow
their definitions, and add no parameters."""

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
    """Returns the pattern of one layer: the same window in all heads, or one for each (row 103: dilation by head)."""
    windows = [Window(*side) for side in heads]
    return (windows[0] if len(set(heads)) == 1 else PerHead(*windows)) | Global()


def by_hand(layer: Any, heads: list[Side], valid: Tensor, is_global: Tensor, x: Tensor) -> Tensor:
    """Computes [B, T, M] -> [B, T, M] by the definition: scores of all pairs, of which the visible ones are kept."""
    count = x.shape[1]
    distance = torch.arange(count) - torch.arange(count)[:, None]
    in_window = torch.stack(
        [(distance >= -b * s) & (distance <= a * s) & (distance % s == 0) for b, a, s in heads]
    )  # [H, T, T]
    visible = (in_window | is_global[:, None, None, :]) & valid[:, None, None, :]

    def attended(q: Any, k: Any, v: Any, mask: Tensor) -> Tensor:
        a, b, c = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (q, k, v))
        scores = (a @ b.mT * a.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)  # padding sees nothing
        out: Tensor = (weights @ c).transpose(1, 2).flatten(2)
        return out

    local_out = attended(layer.q_proj, layer.k_proj, layer.v_proj, visible)
    everything = valid[:, None, None, :].expand_as(visible)
    global_out = attended(layer.q_global_proj, layer.k_global_proj, layer.v_global_proj, everything)
    y: Tensor = layer.o_proj(torch.where(is_global.unsqueeze(-1), global_out, local_out))
    return y


@pytest.mark.parametrize("marked", [[[], []], [[0], [0, 3, 11]], [[5], []]], ids=str)
@pytest.mark.parametrize("layers", LAYERS, ids=["windows", "dilations", "by head"])
def test_rows_96_and_103_an_encoder_is_its_definition(
    layers: list[list[Side]], marked: list[list[int]]
) -> None:
    """Windows and dilations by layer and by head, with global tokens that differ from row to row."""
    model = made(encoder([pattern_of(heads) for heads in layers], len(layers)))
    tokens = Tokens.from_lengths([20, 13]).with_global(marked)
    valid, batch = tokens.valid, ids(2, 20)
    with torch.no_grad():
        actual = model(batch, tokens=tokens)[valid]
        for block, heads in zip(model.model.blocks, layers, strict=True):
            layer = block.self_attn

            def shown(x: Tensor, *, layer: Any = layer, heads: Any = heads, **_: Any) -> Tensor:
                return by_hand(layer, heads, valid, tokens.globals, x)

            layer.forward = shown  # type: ignore[method-assign,assignment]
        expected = model(batch, tokens=tokens)[valid]
    assert off(actual, expected) < EXACT


def test_row_103_each_layer_sees_by_its_own_pattern() -> None:
    patterns = [pattern_of(heads) for heads in LAYERS[0]]
    swapped = encoder([patterns[1], patterns[0], patterns[2]], 3)
    first, second = made(encoder(patterns, 3)), made(swapped)
    with torch.no_grad():
        assert off(first(ids(1, 20)), second(ids(1, 20))) > 1e-3


@pytest.mark.parametrize("window", [19, 20, 60])
def test_row_94_a_window_that_reaches_all_is_full(window: int) -> None:
    batch = ids(2, 20)
    with torch.no_grad():
        full, windowed = (made(encoder(p))(batch) for p in (Full(), Window.around(window) | Global()))
        assert off(windowed, full) < EXACT
        assert off(made(encoder(Window.around(18)))(batch), full) > 1e-6


def test_row_105_one_state_dict_in_all_patterns() -> None:
    patterns = [
        Full(), Window.around(3), Window.around(3, step=2), Window.around(3) | Global(), Full() | Global(),
        PerHead(*(Window.around(i) for i in range(HEADS))) | Global(),
    ]  # fmt: skip
    base = made(encoder(Full()))
    outputs = []
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
            outputs.append(model(ids(1, 20)))
    assert all(
        off(a, b) > 1e-6 for a, b in itertools.combinations([outputs[0], *outputs[1:3], outputs[5]], 2)
    )
    assert off(outputs[4], outputs[0]) < EXACT
