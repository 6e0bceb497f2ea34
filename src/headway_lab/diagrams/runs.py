"""Drawings made by runs: rotated pairs, the numbers that a norm averages, the keys that a token sees, and the decay of
a rotary score."""

from functools import partial
from typing import Any

import torch
from torch import nn

from headway.nn import LayerNorm, RMSNorm
from headway.patterns import Full, Global, Pattern, Window, visible
from headway.positions import Rotary
from headway.tokens import Tokens
from headway_lab.diagrams.drawing import Drawing
from headway_lab.diagrams.models import Say
from headway_lab.draw import BLUE, GREEN, GREY, PALE, PALETTE
from headway_lab.explain.rotary_decay import decay

PAIRS = 4


def turned_pairs(say: Say) -> Drawing:
    """Draws the pairs of a vector, each in its colour, rotated by `Rotary` at positions 0 to 4."""
    rotary, positions = Rotary(pairing="adjacent"), range(5)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(PAIRS)
    ends = rotary.rotate(start.expand(1, 1, len(positions), -1), torch.arange(len(positions)))[0, 0]
    frequencies = rotary.frequencies(2 * PAIRS).tolist()
    drawing = Drawing(800, 560)
    drawing.text(12, 20, say("pairs", width=2 * PAIRS), anchor="start", size=14, bold=True)
    for i, theta in enumerate(frequencies):
        at, colour = 200 + 155 * i, PALETTE[i]
        for j in (0, 1):
            drawing.box(
                at - 32 + 32 * j, 40, 32, 26, f"x{2 * i + j + 1}", fill=colour, edge="white", ink="white"
            )
        drawing.text(at, 82, f"θ{i + 1} = {theta:g}", ink=colour, bold=True)
    for m, row in zip(positions, ends.unflatten(-1, (PAIRS, 2)).tolist(), strict=True):
        y = 136 + 88 * m
        drawing.text(20, y, f"m = {m}", anchor="start", bold=True)
        for i, (x1, x2) in enumerate(row):
            at, colour = 200 + 155 * i, PALETTE[i]
            drawing.circle(at, y, 32)
            drawing.line((at, y), (at + 32, y), colour=GREY, width=0.8)
            drawing.line((at, y), (at + 32 * x1, y - 32 * x2), colour=colour, width=2.2, arrow=True)
            drawing.text(at + 38, y + 26, f"{m * frequencies[i]:.4g} rad", anchor="start", size=10, ink=GREY)
    return drawing


def norms(say: Say) -> Drawing:
    """Draws batch x tokens x features as a cube for each norm: blue marks the inputs that the gradient of one
    normalized output reaches."""
    kinds: dict[str, Any] = {
        "BatchNorm": partial(nn.BatchNorm1d, affine=False),
        "LayerNorm": LayerNorm,
        "RMSNorm": RMSNorm,
    }
    drawing, count = Drawing(800, 268), 5
    for place, (name, make) in enumerate(kinds.items()):
        reached = reach(make(count).double(), count)
        left = 40 + 260 * place
        drawing.text(left - 20, 20, name, anchor="start", size=14, bold=True)
        drawing.text(left - 20, 40, say(name), anchor="start", size=11, ink=GREY)
        cube(drawing, left, 110, reached)
        drawing.text(left + 60, 248, say("features"), size=11)
        drawing.text(left - 8, 170, say("tokens"), size=11, anchor="end")
        drawing.text(left + 164, 232, say("rows"), size=11, anchor="start")
    return drawing


def reach(norm: nn.Module, count: int) -> torch.Tensor:
    """Returns bool [B, T, M]: the inputs that the normalized output of the last row, first token and last feature
    depends on."""
    x = torch.randn(count, count, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_()
    y = norm.train()(x.flatten(0, 1)).view_as(x)
    y[-1, 0, -1].backward()
    assert x.grad is not None
    return x.grad.abs() > 1e-9


def cube(drawing: Drawing, x: float, y: float, reached: torch.Tensor) -> None:
    """Draws the three visible sides of a cube: those of the last row, of the first token and of the last feature."""
    count, side, slant = len(reached), 24, 11
    for b in range(count):
        depth = (count - 1 - b) * slant
        for n in range(count):
            top = (x + n * side + depth, y - depth)
            right = (x + count * side + depth, y + n * side - depth)
            above, beside = (BLUE if hit else PALE for hit in (reached[b, 0, n], reached[b, n, -1]))
            corners = ((0, 0), (side, 0), (side + slant, -slant), (slant, -slant))
            drawing.polygon([(top[0] + a, top[1] + c) for a, c in corners], fill=above, edge=GREY)
            corners = ((0, 0), (slant, -slant), (slant, side - slant), (0, side))
            drawing.polygon([(right[0] + a, right[1] + c) for a, c in corners], fill=beside, edge=GREY)
    for t in range(count):
        for m in range(count):
            a, c = x + m * side, y + t * side
            fill = BLUE if reached[-1, t, m] else PALE
            drawing.polygon(
                ((a, c), (a + side, c), (a + side, c + side), (a, c + side)), fill=fill, edge=GREY
            )


PATTERNS: dict[str, Pattern] = {
    "full": Full(),
    "window": Window.around(3),
    "dilated": Window.around(3, step=2),
    "global": Window.around(2) | Global(),
}


def four_patterns(say: Say) -> Drawing:
    """Draws the keys that each of 24 tokens sees: queries down, keys to the right; in the fourth pattern, tokens 0 and
    9 are global."""
    count, side = 24, 7.5
    tokens = Tokens.range(count).with_global([0, 9])
    drawing = Drawing(800, 262)
    for place, (name, pattern) in enumerate(PATTERNS.items()):
        allowed = visible(pattern, tokens, tokens)[0, 0]
        left = 14 + 198 * place
        drawing.text(left, 18, say(name), anchor="start", size=13, bold=True)
        drawing.cells(left, 38, side, [[GREEN if seen else PALE for seen in row] for row in allowed.tolist()])
        share = f"{int(allowed.sum())} / {count * count}"
        drawing.text(left, 236, say("pairs seen", pairs=share), anchor="start", size=11, ink=GREY)
    return drawing


def decaying(say: Say) -> Drawing:
    """Draws f(m) (`headway_lab.explain.rotary_decay`) for width 128 up to distance 256, and the same with one frequency
    for all pairs."""
    rotary, far = Rotary(pairing="adjacent"), 256
    frequencies, m = rotary.frequencies(128), torch.arange(far + 1)
    drawing, left, bottom, chart_width, chart_height = Drawing(800, 340), 70, 280, 680, 230
    drawing.text(12, 20, say("decay"), anchor="start", size=14, bold=True)
    for value in range(0, 40, 10):
        y = bottom - chart_height * value / 35
        drawing.line((left, y), (left + chart_width, y), colour=PALE)
        drawing.text(left - 8, y, str(value), anchor="end", size=11)
    for value in range(0, far + 1, 64):
        drawing.text(left + chart_width * value / far, bottom + 16, str(value), size=11)
    for curve, colour in ((decay(m, torch.ones_like(frequencies)), GREY), (decay(m, frequencies), BLUE)):
        heights = [round(height, 3) for height in curve.tolist()]
        points = [
            (left + chart_width * i / far, bottom - chart_height * height / 35)
            for i, height in enumerate(heights)
        ]
        drawing.line(*points, colour=colour, width=2)
    drawing.text(
        left + chart_width,
        bottom - chart_height * 32.5 / 35 - 12,
        say("equal"),
        anchor="end",
        ink=GREY,
        size=11,
    )
    drawing.text(left + chart_width / 2, bottom + 40, say("distance"), size=12)
    return drawing
