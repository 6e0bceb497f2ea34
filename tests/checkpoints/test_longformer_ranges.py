"""Longformer equals transformers for any windows of its layers, any lengths and any global tokens."""

from functools import cache
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headway.checkpoints.hf.config import spec_from_config
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.checkpoints.hf.layouts.rules import layered
from headway.checkpoints.hf.layouts.tensors import exported
from headway.models import build
from headway.patterns import Global, Window
from tests.checkpoints.hf import off
from tests.checkpoints.test_longformer import CONFIG, peer, rows

LONGEST = CONFIG["max_position_embeddings"] - 2


@cache
def pair() -> tuple[Any, Any]:
    """Returns a transformers model, and ours with the same weights."""
    model = peer("LongformerModel", attention_window=[4, 4])
    spec = spec_from_config({**model.config.to_dict(), "architectures": ["LongformerModel"]})
    encoder = build(spec, seed=0).eval()
    theirs = model.state_dict()
    with torch.no_grad():
        rules = layered(LAYOUTS["longformer"].tensors.rules(spec), spec)
        state = {
            name: part
            for rule in rules
            for name, part in zip(
                rule.ours, rule.split(theirs[rule.theirs.removeprefix("longformer.")]), strict=True
            )
        }
        encoder.load_state_dict(state)
    written = exported(LAYOUTS["longformer"].tensors, encoder.state_dict(), spec)
    assert all(torch.equal(value, theirs[name]) for name, value in written.items())
    return model, encoder


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Draws (window of each layer, length of each row, global tokens of each row); transformers accepts even windows of
    at least 4 that divide the largest."""
    largest = draw(st.sampled_from((4, 6, 8, 12, 16, 24, 40)))
    divisors = [window for window in range(4, largest + 1, 2) if largest % window == 0]
    windows = draw(st.permutations([largest, draw(st.sampled_from(divisors))]))
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3))
    marked = [sorted(draw(st.sets(st.integers(0, length - 1)))) for length in lengths]
    return list(windows), lengths, marked


@given(cases())
@example(([8, 4], [16, 24], [[], []]))
@example(([8, 4], [15, 17], [[0], list(range(17))]))
@torch.no_grad()
def test_windows_lengths_and_global_tokens_of_any_kind(
    case: tuple[list[int], list[int], list[list[int]]],
) -> None:
    windows, lengths, marked = case
    model, encoder = pair()
    model.config.attention_window = windows
    for layer, window in zip(model.encoder.layer, windows, strict=True):
        layer.attention.self.one_sided_attn_window_size = window // 2
    patterns = [Window.around(window // 2) | Global() for window in windows]
    windowed = build(encoder.spec.with_patterns(patterns), seed=0).eval()
    windowed.load_state_dict(encoder.state_dict())
    ids, tokens, mask = rows(lengths, max(lengths))
    tokens = tokens.with_global(marked)
    outputs = model(ids, attention_mask=mask, global_attention_mask=tokens.globals.expand_as(ids).long())
    valid = mask.bool()
    assert off(windowed(ids, tokens=tokens)[valid], outputs.last_hidden_state[valid]) < 1e-5
