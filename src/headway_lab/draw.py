"""Figures in one style for the whole laboratory, drawn on matplotlib's Agg canvas, without a window."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from headway.fonts import fonts
from headway.patterns import Or, Pattern, visible
from headway.patterns.picture import BLUE as BLUE
from headway.patterns.picture import GREEN as GREEN
from headway.patterns.picture import GREY as GREY
from headway.patterns.picture import INK as INK
from headway.patterns.picture import ORANGE as ORANGE
from headway.patterns.picture import PALE as PALE
from headway.patterns.picture import PALETTE as PALETTE
from headway.patterns.picture import RED as RED
from headway.patterns.picture import VIOLET as VIOLET
from headway.tokens import Tokens

STYLE: Any = {
    "figure.facecolor": "white",
    "figure.dpi": 150,
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.bbox": "tight",
}


@contextmanager
def saved_figure(
    path: Path, width: float = 8.0, height: float = 4.5, *, language: str = "en"
) -> Iterator[Any]:
    """Yields a matplotlib `Figure` in headway's style, and writes it to `path` if the block ends without an error.

    `width` and `height` are in inches; text uses the fonts of `language`. The file type follows the suffix: png, svg,
    pdf."""
    colours = cycler(color=[BLUE, ORANGE, GREEN, RED, VIOLET, GREY])
    style = {**STYLE, "axes.prop_cycle": colours, "font.family": fonts(language)}
    if language == "zh":
        style["axes.titleweight"] = "normal"  # the font that zhplot ships has one weight
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def draw_patterns(
    figure: Any,
    patterns: Sequence[Pattern],
    count: int = 24,
    tokens: Tokens | None = None,
    titles: Sequence[str] | None = None,
    legend: bool = True,
) -> None:
    """Draws patterns side by side on `figure`, at most four per row: queries down, keys to the right.

    Each part of a union has its own colour (a pair gets that of the first part that allows it); `PerHead` patterns get
    one panel per head. `tokens` marks global tokens; the share of allowed pairs is printed below each panel.
    """
    tokens = Tokens.range(count) if tokens is None else tokens
    names = [str(pattern) for pattern in patterns] if titles is None else list(titles)
    panels = [
        (head, name if len(pattern.heads) == 1 else f"{name}\nhead {number}")
        for pattern, name in zip(patterns, names, strict=True)
        for number, head in enumerate(pattern.heads)
    ]
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure.set_size_inches(3.1 * columns + 0.2, 3.55 * rows + 0.1)
    for place, (pattern, name) in enumerate(panels, start=1):
        draw_pattern(figure.add_subplot(rows, columns, place), pattern, tokens, name, legend)


def command(path: Path, patterns: Sequence[Pattern], count: int, tokens: Tokens) -> None:
    """Writes the patterns to an image file, for `headway show --out`."""
    with saved_figure(path) as figure:
        draw_patterns(figure, patterns, count, tokens)


def draw_pattern(axes: Any, pattern: Pattern, tokens: Tokens, title: str = "", legend: bool = True) -> None:
    """Draws one panel: the cells of the (query, key) pairs that `pattern` allows on row 0 of `tokens`.

    The first line of `title` is the panel's name, further lines are set small; `legend` names the parts of a union
    below the panel."""
    parts = list(pattern.parts) if isinstance(pattern, Or) else [pattern]
    count = tokens.count
    cells = np.zeros((count, count), dtype=int)
    for number, part in reversed(list(enumerate(parts, start=1))):
        cells[visible(part, tokens, tokens)[0, 0].numpy()] = number
    allowed = int((cells > 0).sum())
    colours = [PALE, *(PALETTE[i % len(PALETTE)] for i in range(len(parts)))]
    axes.pcolormesh(
        cells, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1, edgecolors="white", linewidth=0.8
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    marks = range(0, count, max(1, count // 4))
    places = [mark + 0.5 for mark in marks]
    axes.set(aspect="equal", xticks=places, yticks=places, xticklabels=marks, yticklabels=marks)
    axes.tick_params(length=0, labelsize=7)
    axes.spines[:].set_visible(False)
    name, _, declared = title.partition("\n")
    lines = textwrap.wrap(declared, 38, break_long_words=False)
    axes.set_title("\n".join(textwrap.wrap(name, 38)), fontsize=9, loc="left", pad=6 + 10 * len(lines))
    axes.text(
        0, 1.015, "\n".join(lines), transform=axes.transAxes, fontsize=7, family="monospace", va="bottom"
    )
    axes.set_ylabel("query", fontsize=8, color=GREY)
    share = f"{allowed} of {count * count} pairs, {allowed / count**2:.0%}"
    axes.set_xlabel(f"key          {share}", fontsize=8, color=GREY)
    if legend and len(parts) > 1:
        handles = [Patch(color=c, label=str(part)) for c, part in zip(colours[1:], parts, strict=True)]
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": len(parts)}
        axes.legend(handles=handles, fontsize=7, handlelength=0.9, handleheight=0.9, columnspacing=1, **below)
