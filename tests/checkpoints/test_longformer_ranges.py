"""Longformer equal to transformers whatever the windows of its layers, its lengths and its global tokens are."""

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

LONGEST = 40


@cache
def pair() -> tuple[Any, Any]:
    """A model of transformers, and ours with the same weights."""
    model = peer("LongformerModel", attention_window=[4, 4])
    spec = spec_from_config({**model.config.to_dict(), "architectures": ["LongformerModel"]})
    own = build(spec, seed=0).eval()
    theirs = model.state_dict()
    with torch.no_grad():
        rules = layered(LAYOUTS["longformer"].tensors.rules(spec), spec)
        filled = {
            name: part
            for rule in rules
            for name, part in zip(
                rule.ours, rule.split(theirs[rule.theirs.removeprefix("longformer.")]), strict=True
            )
        }
        own.load_state_dict(filled)
    written = exported(LAYOUTS["longformer"].tensors, own.state_dict(), spec)
    assert all(torch.equal(value, theirs[name]) for name, value in written.items())
    return model, own


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """(window of each layer, length of each row, global tokens of each row): transformers takes even windows that
    divide the largest, and are 4 or more."""
    largest = draw(st.sampled_from((4, 6, 8, 12, 16, 24, 40)))
    others = [w for w in range(4, largest + 1, 2) if largest % w == 0]
    windows = draw(st.permutations([largest, draw(st.sampled_from(others))]))
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
    model, own = pair()
    model.config.attention_window = windows
    for layer, window in zip(model.encoder.layer, windows, strict=True):
        layer.attention.self.one_sided_attn_window_size = window // 2
    patterns = [Window.around(window // 2) | Global() for window in windows]
    mine = build(own.spec.with_patterns(patterns), seed=0).eval()
    mine.load_state_dict(own.state_dict())
    ids, tokens, mask = rows(lengths, max(lengths))
    tokens = tokens.with_global(marked)
    said = model(ids, attention_mask=mask, global_attention_mask=tokens.globals.expand_as(ids).long())
    real = mask.bool()
    assert off(mine(ids, tokens=tokens)[real], said.last_hidden_state[real]) < 1e-5


def test_the_model_is_long_enough() -> None:
    assert CONFIG["max_position_embeddings"] >= LONGEST + 2
