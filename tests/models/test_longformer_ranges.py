"""Longformer's claims, rows 94, 96, 103 and 111: any windows, dilations and global tokens, by layer and by head, at
any length, in an encoder and in a decoder, give what dense products in float64 give."""

import itertools
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from headway.models import ModelSpec, build
from headway.patterns import Causal, Global, GlobalKeys, Pattern, PerHead, Window
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.models.longformer_rows import EXACT, HEADS, SIZE, encoder, ids, made

sides = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 4))
layers_of = st.lists(
    st.one_of(sides.map(lambda side: [side] * HEADS), st.lists(sides, min_size=HEADS, max_size=HEADS)),
    min_size=1,
    max_size=3,
)


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Draws the lengths of the rows and the global tokens of each."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    return lengths, [sorted(draw(st.sets(st.integers(0, n - 1), max_size=6))) for n in lengths]


def examples(test: Any) -> Any:
    for layers, marked in itertools.product(LAYERS, ([[], []], [[0], [0, 3, 11]], [[5], []])):
        test = example(layers, ([20, 13], marked), "auto")(test)
    return test


@examples
@given(layers_of, texts(), st.sampled_from(("auto", "banded", "diagonal")))
@torch.no_grad()
def test_rows_96_and_103_an_encoder_is_its_definition(
    layers: list[list[Side]], text: tuple[list[int], list[list[int]]], backend: str
) -> None:
    lengths, marked = text
    model = made(encoder([pattern_of(heads) for heads in layers], len(layers)), backend)
    tokens = Tokens.from_lengths(lengths).with_global(marked)
    valid, batch = tokens.valid, ids(len(lengths), max(lengths))
    actual = model(batch, tokens=tokens)[valid]
    for block, heads in zip(model.model.blocks, layers, strict=True):
        layer = block.self_attn

        def shown(x: Tensor, *, layer: Any = layer, heads: Any = heads, **_: Any) -> Tensor:
            return by_hand(layer, heads, valid, tokens.globals, x)

        layer.forward = shown  # type: ignore[method-assign,assignment]
    assert off(actual, model(batch, tokens=tokens)[valid]) < EXACT


def causal(heads: list[tuple[int, int]]) -> Pattern:
    """Returns windows that only look back, (tokens, step) for each head, with global keys."""
    windows = [Window(before, 0, step) for before, step in heads]
    return (windows[0] if len(set(heads)) == 1 else PerHead(*windows)) | (Causal() & GlobalKeys())


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=HEADS, max_size=HEADS),
        min_size=2,
        max_size=2,
    ),
    texts(),
    st.sampled_from(("auto", "banded", "diagonal")),
)
@torch.no_grad()
def test_a_decoder_with_dilated_windows_is_its_dense_form(
    layers: list[list[tuple[int, int]]], text: tuple[list[int], list[list[int]]], backend: str
) -> None:
    lengths, marked = text
    spec = ModelSpec.of(
        "llama", **{**SIZE, "layers": 2, "kv_heads": HEADS, "patterns": [causal(h) for h in layers]}
    )
    tokens = Tokens.from_lengths(lengths).with_global(marked)
    batch = ids(len(lengths), max(lengths))
    logits = [
        build(spec, seed=3, dtype=torch.float64, backend=b).eval()(batch, tokens=tokens)[tokens.valid]
        for b in (backend, "dense")
    ]
    assert off(*logits) < EXACT
