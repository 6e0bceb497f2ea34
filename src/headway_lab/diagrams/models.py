"""Drawings of the parts of a model, from its spec: blocks, the inside of multi-head attention, and shared KV heads."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from headway.heads import Heads
from headway.models import ModelSpec, catalog
from headway.nn import Attention
from headway_lab.diagrams.drawing import Drawing
from headway_lab.draw import BLUE, GREEN, GREY, ORANGE, PALETTE, VIOLET

Say = Callable[..., str]
"""Returns the label of a key in the picture's language, with numbers filled in."""

PINK, SKY, MINT, SAND, LILAC = "#f6dcd9", "#d9e6f4", "#dcefe4", "#fbe8cf", "#e4dcf1"
NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}
WIDE, TALL, APART = 170, 36, 14


class Part(NamedTuple):
    """A box of a block. `opens`: the residual branches off below it; `adds`: it is added back above it."""

    words: str
    fill: str
    opens: bool = False
    adds: bool = False


def blocks(say: Say) -> Drawing:
    """Draws the encoder and the decoder of 2017 and LLaMA's decoder, side by side, from the bottom up."""
    base, llama = (catalog.spec(name) for name in ("transformer-base", "llama-2-70b"))
    assert base.encoder is not None
    drawing = Drawing(800, 560)
    drawing.text(285, 18, say("of 2017", model="transformer-base"), size=14, bold=True)
    drawing.text(670, 18, "llama-2-70b", size=14, bold=True)
    top, _ = stack(drawing, 70, base.encoder, say, cross=False)
    _, joins = stack(drawing, 320, base, say, cross=True)
    stack(drawing, 585, llama, say, cross=False)
    between = 259
    route = ((155, top + 6), (155, top - 14), (between, top - 14), (between, joins), (320, joins))
    drawing.line(*route, colour=VIOLET, arrow=True)
    drawing.text(165, top - 24, say("k, v"), ink=VIOLET, anchor="start", size=11)
    return drawing


def layer(spec: ModelSpec, say: Say, cross: bool) -> Iterator[Part]:
    """Yields the boxes of a layer from the bottom up: with a norm after each residual sum (post) or before each
    sub-layer (pre)."""
    heads = Heads.of(spec.heads, spec.kv_heads)
    turned = say("turned") if spec.positions.marks == "queries and keys" else ""
    mask = say("masked" if spec.causal else "full", kind=heads.kind)
    sizes = say("heads", heads=spec.heads, kv_heads=spec.kv_heads, kind=heads.kind, dims=spec.head_dim)
    form = say("gated" if spec.gated else "plain", act={"silu": "SwiGLU", "relu": "ReLU"}[spec.activation])
    subs = [(f"{mask}{turned}\n{sizes}", SAND)]
    subs += [(f"{say('cross')}\n{sizes}", LILAC)] * cross
    subs += [(f"{form}\n{spec.width:,} → {spec.hidden:,} → {spec.width:,}", SKY)]
    for words, fill in subs:
        norm = Part(NORMS[spec.norm], MINT)
        if spec.order == "pre":
            yield norm._replace(opens=True)
            yield Part(words, fill, adds=True)
        else:
            yield Part(words, fill, opens=True, adds=True)
            yield norm


def stack(drawing: Drawing, x: float, spec: ModelSpec, say: Say, cross: bool) -> tuple[float, float]:
    """Draws a model from its embedding up to its output, in a column whose left side is `x`; returns the y of the top
    of its layers and of the middle of the cross-attention box (0 if it has none)."""
    middle, y, joins = x + WIDE / 2, 502.0, 0.0
    scale = f" × √{spec.width}" if spec.embedding_scale != 1 else ""
    drawing.box(x, y, WIDE, TALL, f"{say('embedding')}{scale}\n{spec.vocab:,} × {spec.width:,}", fill=PINK)
    drawing.text(middle, y + TALL + 14, say("decoder input" if spec.causal else "encoder input"), ink=GREY)
    if spec.positions.marks != "queries and keys":
        y = plus(drawing, middle, y)
        drawing.text(middle + 14, y, say("positions"), anchor="start", size=11)
        y -= 8
    bottom, entry = y - APART / 2, y
    y -= APART
    for part in layer(spec, say, cross):
        height = TALL if "\n" in part.words else 24
        if part.opens:
            entry = y + APART / 2 + 2
        drawing.line((middle, y + APART), (middle, y), arrow=True)
        y -= height
        drawing.box(x, y, WIDE, height, part.words, fill=part.fill, size=11)
        if part.fill == LILAC:
            joins = y + height / 2
        if part.adds:
            y = plus(drawing, middle, y)
            side = x - 12
            drawing.line((middle, entry), (side, entry), (side, y), (middle - 8, y), colour=GREEN, arrow=True)
            y -= 8
        y -= APART
    top = y + APART / 2
    drawing.box(x - 24, top, WIDE + 36, bottom - top, fill="none", edge=GREY, dashed=True)
    drawing.text(x - 28, (top + bottom) / 2, f"{spec.layers} ×", anchor="end", size=13, bold=True)
    for words, fill in head(spec, say):
        drawing.line((middle, y + APART), (middle, y), arrow=True)
        y -= 24
        drawing.box(x, y, WIDE, 24, words, fill=fill, size=11)
        y -= APART
    return top, joins


def head(spec: ModelSpec, say: Say) -> Iterator[tuple[str, str]]:
    """Yields the boxes above the layers."""
    if spec.final_norm:
        yield NORMS[spec.norm], MINT
    if spec.causal:
        yield say("tied" if spec.tied else "output"), PINK
        yield "softmax", PINK


def plus(drawing: Drawing, x: float, y: float) -> float:
    """Draws a sum node above `y` and an arrow to it; returns the y of its middle."""
    y -= APART + 8
    drawing.line((x, y + 8 + APART), (x, y + 8), arrow=True)
    drawing.circle(x, y, 8, fill="white", edge=GREEN)
    drawing.text(x, y, "+", ink=GREEN, bold=True)
    return y


def multi_head(say: Say) -> Drawing:
    """Draws multi-head attention from x to the output, with the sizes of a real layer's parameters."""
    spec = catalog.spec("transformer-base")
    built = Attention(spec.width, spec.heads, spec.kv_heads)
    shape = {name: "×".join(map(str, reversed(p.shape))) for name, p in built.named_parameters()}
    count = sum(p.numel() for p in built.parameters())
    drawing = Drawing(800, 470)
    drawing.text(
        12, 20, say("multi-head", heads=spec.heads, count=f"{count:,}"), anchor="start", size=14, bold=True
    )
    drawing.box(330, 420, 140, 34, f"x\nn × {spec.width}", fill=PINK)
    for i, (name, at) in enumerate((("q", 100), ("k", 330), ("v", 560))):
        weight = shape[f"{name}_proj.weight"]
        drawing.line((400, 420), (at + 70, 396), arrow=True)
        drawing.box(at, 360, 140, 36, f"W_{name}\n{weight}", fill=SKY)
        for h in reversed(range(4)):
            y = 300 - 5 * h
            drawing.box(at + 5 * h, y, 140, 36, "" if h else f"{name}\nn × {spec.head_dim}", fill="white",
                        edge=PALETTE[h % len(PALETTE)])  # fmt: skip
        drawing.line((at + 70, 360), (at + 70, 336), arrow=True)
        if i == 0:
            drawing.text(12, 308, say("each head", heads=spec.heads), anchor="start", ink=GREY)
    chain = (
        ("q · k", 248, SAND),
        (f"/ √{spec.head_dim}", 218, SAND),
        (say("mask"), 188, SAND),
        ("softmax", 158, SAND),
    )
    drawing.line((170, 285), (250, 272), arrow=True)
    drawing.line((400, 285), (320, 272), arrow=True)
    for words, y, fill in chain:
        drawing.box(210, y, 150, 24, words, fill=fill)
        if y != 248:
            drawing.line((285, y + 30), (285, y + 24))
    drawing.text(372, 200, say("scores"), anchor="start", ink=GREY, size=11)
    drawing.line((285, 158), (285, 144), arrow=True)
    drawing.line((630, 285), (630, 132), (360, 132), arrow=True)
    drawing.box(210, 120, 150, 24, say("times v"), fill=SAND)
    drawing.line((285, 120), (285, 102), arrow=True)
    drawing.box(
        190, 76, 190, 26, say("joined", wide=f"{spec.heads}·{spec.head_dim}"), fill="white", edge=BLUE
    )
    drawing.line((380, 89), (430, 89), arrow=True)
    drawing.box(430, 71, 120, 36, f"W_o\n{shape['o_proj.weight']}", fill=SKY)
    drawing.line((550, 89), (600, 89), arrow=True)
    drawing.box(600, 71, 140, 36, f"{say('result')}\nn × {spec.width}", fill=PINK)
    return drawing


def shared_heads(say: Say) -> Drawing:
    """Draws 8 query heads over 8, 4 and 1 KV heads: which query head reads which KV head, and the numbers cached per
    token."""
    drawing, dims = Drawing(800, 250), 64
    for number, kv_heads in enumerate((8, 4, 1)):
        layout, left = Heads.of(8, kv_heads), 30 + 260 * number
        stored = 2 * kv_heads * dims
        drawing.text(left, 20, say(layout.kind, group=layout.group), anchor="start", size=14, bold=True)
        for k in range(kv_heads):
            colour = PALETTE[k % len(PALETTE)] if kv_heads > 1 else ORANGE
            places = [left + 28 * h + 10 for h in range(k * layout.group, (k + 1) * layout.group)]
            middle = sum(places) / len(places)
            for x in places:
                drawing.line((x, 168), (middle, 108), colour=colour)
                drawing.box(x - 10, 168, 20, 28, "q", fill="white", edge=colour, size=11)
            for y, name in ((82, "k"), (50, "v")):
                drawing.box(middle - 10, y, 20, 28, name, fill=colour, edge=colour, ink="white", size=11)
        drawing.text(
            left, 222, say("kept", count=stored, share=f"{kv_heads}/8"), anchor="start", ink=GREY, size=11
        )
    return drawing
