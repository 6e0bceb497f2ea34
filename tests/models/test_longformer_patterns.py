"""Longformer's claims, rows 94, 103 and 105: windows by layer, windows that reach all, and one state dict for all."""

import itertools

import pytest
import torch

from headway.models import cost
from headway.patterns import Full, Global, PerHead, Window
from tests.checkpoints.hf import off
from tests.models.longformer_rows import EXACT, HEADS, encoder, ids, made


def test_row_103_each_layer_sees_by_its_own_pattern() -> None:
    patterns = [Window.around(tokens) | Global() for tokens in (2, 4, 7)]
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
