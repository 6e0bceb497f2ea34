"""Matrices of query and key cells as pictures for a notebook: self-contained HTML without scripts."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from torch import Tensor

INK, GREY, PALE = "#1d2733", "#8a94a0", "#e9edf1"
BLUE, ORANGE, GREEN, RED, VIOLET = "#2f6fb3", "#e08a1e", "#3c9b6b", "#c8453c", "#7a5bb0"
PALETTE = (BLUE, ORANGE, GREEN, VIOLET, RED)
LONGEST = 12  # most characters of a label


def svg(
    cells: Tensor,
    fills: Sequence[str],
    *,
    side: float,
    queries: Sequence[str] = (),
    keys: Sequence[str] = (),
) -> str:
    """Returns an SVG of `cells` [N, S] with queries downwards and keys to the right: a cell of value c > 0 has the
    color fills[c - 1], and 0 stays pale.

    side: width of a cell, in pixels.   queries, keys: labels beside the rows and above the columns; none by default.
    """
    count, width = cells.shape
    left, above = (_room(texts) for texts in (queries, keys))
    paths: list[list[str]] = [[] for _ in fills]
    for y, row in enumerate(cells.tolist()):
        x = 0
        for value, run in groupby(row):
            length = len(list(run))
            if value:
                paths[value - 1].append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    size = f"{left + width * side + 1:g}", f"{above + count * side + 1:g}"
    lines = "".join(f"M0 {y}h{width}" for y in range(count + 1)) + "".join(
        f"M{x} 0v{count}" for x in range(width + 1)
    )
    texts = [
        f'<text x="{left - 4:g}" y="{above + (i + 0.5) * side:g}" text-anchor="end" dy=".35em">{_label(text)}</text>'
        for i, text in enumerate(queries)
    ] + [
        f'<text transform="translate({left + (i + 0.5) * side:g} {above - 4:g}) rotate(-90)" dy=".35em">'
        f"{_label(text)}</text>"
        for i, text in enumerate(keys)
    ]
    painted = "".join(
        f'<path fill="{fill}" d="{"".join(path)}"/>' for fill, path in zip(fills, paths, strict=True) if path
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="10" fill="{INK}">'
        f'<g transform="translate({left:g} {above:g}) scale({side:g})">'
        f'<rect width="{width}" height="{count}" fill="{PALE}"/>{painted}'
        f'<path d="{lines}" stroke="white" stroke-width="{min(0.1, 0.6 / side):g}" fill="none"/></g>'
        f"{''.join(texts)}</svg>"
    )


def figure(panels: Sequence[tuple[str, str]], below: str = "") -> str:
    """Returns HTML with titled pictures side by side, as many per row as fit, and a line below them. Titles are
    plain text, the pictures and the line HTML."""
    boxes = "".join(
        f'<div><div style="font-size:11px;margin-bottom:3px">{escape(title)}</div>{picture}</div>'
        for title, picture in panels
    )
    return (
        f'<div style="background:white;color:{INK};font-family:sans-serif;padding:8px">'
        f'<div style="display:flex;flex-wrap:wrap;gap:14px">{boxes}</div>'
        f'<div style="color:{GREY};font-size:11px;margin-top:6px">{below}</div></div>'
    )


def _label(text: str) -> str:
    """Returns the label of a row or column, shortened if it is too long."""
    return escape(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…")


def _room(texts: Sequence[str]) -> float:
    """Returns the pixels that labels need."""
    return 8 + 7 * max(min(len(text), LONGEST) for text in texts) if texts else 0
