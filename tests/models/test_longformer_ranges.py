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
