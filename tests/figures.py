"""Lists a figure as text, panel by panel: words, data, colours and positions of everything visible."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedFormatter

from tests.listings import number

SHOWN = 4
"""How many numbers of a longer series are listed, evenly spread, with its count and mean."""


@contextmanager
def kept(told: list[str], path: Path, width: float = 8.0, height: float = 4.5) -> Iterator[Figure]:
    """Replaces `headway_lab.draw.saved_figure`: appends each figure's listing to `told` instead of saving it."""
    figure = Figure(figsize=(width, height))
    yield figure
    told.append(f"{path.name}\n{listing(figure)}\n")


MOST = 40
"""How many bars or boxes of a panel are listed one by one."""


def listing(figure: Figure) -> str:
    """Lists every panel, in the order of creation."""
    width, height = figure.get_size_inches()
    lines = [f"figure {number(float(width))} x {number(float(height))}"]
    for n, axes in enumerate(figure.axes):
        lines += ["", f"panel {n} at {series(axes.get_position().bounds)}", *panel(axes)]
    for legend in (*figure.legends, *(x for part in figure.subfigs for x in part.legends)):
        lines.append(f"legend of all {legend_text(legend)}")
    for text in texts(figure):
        lines.append(f"text of all {text}")
    return "\n".join(lines)


def texts(figure: Figure | SubFigure) -> Iterator[str]:
    for text in figure.texts:
        yield words(text)
    for part in figure.subfigs:
        yield from texts(part)


def panel(axes: Axes) -> Iterator[str]:
    """Yields the lines of a panel: its words, scales, and artists."""
    for loc in ("center", "left", "right"):
        if axes.get_title(loc):
            title = {"center": axes.title, "left": axes._left_title, "right": axes._right_title}[loc]  # type: ignore[attr-defined]
            yield f"title {loc} {words(title)}"
    for name, axis in axes._axis_map.items():  # type: ignore[attr-defined]
        least, most = axis.get_view_interval()
        yield f"{name} {words(axis.label)} {axis.get_scale()} {series([least, most])}"
        formatter = axis.get_major_formatter()
        if isinstance(formatter, FixedFormatter):
            marks = zip(axis.get_majorticklocs(), formatter.seq, strict=False)
            yield f"{name} marks " + ", ".join(f"{number(float(at))} {text!r}" for at, text in marks)
        elif axis.get_scale() == "log" or not len(axis.get_majorticklocs()):
            smaller = "and" if len(axis.get_minorticklocs()) else "no"
            yield f"{name} marks {series(axis.get_majorticklocs())}, {smaller} smaller"
        grid = axis._major_tick_kw.get("gridOn"), axis._major_tick_kw.get("tick1On", True)
        size = axis._major_tick_kw.get("labelsize"), axis._major_tick_kw.get("size")
        if (grid, size) != ((False, True), (None, None)):
            yield f"{name} grid {grid}, size {size}"
    frame = "".join("1" if spine.get_visible() else "0" for spine in axes.spines.values())
    if (frame, face := hue(axes.get_facecolor()), axes.axison) != ("1111", "#ffffff", True):
        yield f"frame {frame}, face {face}, {'' if axes.axison else 'no '}axes"
    if legend := axes.get_legend():
        yield f"legend {legend_text(legend)}"
    yield from map(artist, (*axes.lines, *axes.images, *axes.collections[:MOST], *axes.texts))
    yield from bars(list(axes.patches))


def legend_text(legend: Any) -> str:
    handles = [
        hue(h.get_color() if isinstance(h, Line2D) else h.get_facecolor()) for h in legend.legend_handles
    ]
    parent = legend.parent
    frame = parent.transAxes if isinstance(parent, Axes) else parent.transSubfigure
    box = legend.get_bbox_to_anchor().transformed(frame.inverted()).bounds
    names = ", ".join(f"{text.get_text()!r} {h}" for text, h in zip(legend.get_texts(), handles, strict=True))
    return f"at {legend._loc} {series(box)} size {legend._fontsize}, {legend._ncols} columns: {names}"


def words(text: Text) -> str:
    at = text.xyann if isinstance(text, Annotation) else ()
    place = f"{text.get_ha()} {text.get_va()} {series(at)}"
    return f"{text.get_text()!r} size {number(float(text.get_fontsize()))} {hue(text.get_color())} {place}".rstrip()


def artist(art: Any) -> str:
    """Describes one line, image, collection or text."""
    if isinstance(art, Line2D):
        label = "" if art.get_label().startswith("_") else f"{art.get_label()!r} "
        look = f"{art.get_linestyle()} {number(art.get_linewidth())} {art.get_marker()} {number(art.get_markersize())}"
        colour = f"{hue(art.get_color())} {hue(art.get_markerfacecolor())}"
        look = f"{look} {colour} alpha {art.get_alpha()} over {art.get_zorder()}"
        return f"line {label}{look}: x {series(art.get_xdata())}; y {series(art.get_ydata())}"
    if isinstance(art, AxesImage):
        data, shown = np.ma.asarray(art.get_array()), series(np.asarray(art.get_extent(), float))
        limits = series([x for x in art.get_clim() if x is not None])
        return f"image {data.shape} {art.get_cmap().name} {limits} within {shown}: {series(data.ravel())}"
    if isinstance(art, Collection):
        label = "" if str(art.get_label()).startswith("_") else f"{art.get_label()!r} "
        at, paths = np.asarray(art.get_offsets()), art.get_paths()
        points = np.concatenate([path.vertices.ravel() for path in paths[:500]]) if paths else np.zeros(0)
        colours = [hue(c) for c in art.get_facecolor()[:: max(1, len(art.get_facecolor()) // 4)]]
        array = "" if art.get_array() is None else f" of {series(np.ma.asarray(art.get_array()).ravel())}"
        sizes = series(getattr(art, "get_sizes", list)())
        return f"{type(art).__name__} {label}{colours} sizes {sizes} at {series(at.ravel())}: {series(points)}{array}"
    x, y = art.get_position()
    return f"text {series([x, y])} {words(art)}"


def bars(patches: list[Patch]) -> Iterator[str]:
    """Yields position and size of each rectangle, up to `MOST`, and the number of the others."""
    for n, patch in enumerate(patches):
        if n == MOST:
            yield f"and {len(patches) - n} more"
            return
        look = f"{hue(patch.get_facecolor())} {patch.get_hatch() or ''} alpha {patch.get_alpha()}"
        box = (
            patch.get_bbox().bounds
            if isinstance(patch, (Rectangle, FancyBboxPatch))
            else patch.get_extents().bounds
        )
        yield f"{type(patch).__name__} {look}: {series(box)}"


def hue(colour: Any) -> str:
    if isinstance(colour, str) and colour in ("none", "None", "auto"):
        return colour
    flat = np.asarray(colors.to_rgba_array(colour))
    return colors.to_hex(flat[0], keep_alpha=flat[0][3] != 1) if len(flat) else "none"


def series(values: Iterable[Any]) -> str:
    """Formats numbers; of a long series some samples with count and mean. Strings stay as they are."""
    flat = list(np.ma.asarray(values).ravel().tolist() if not isinstance(values, (list, tuple)) else values)
    if any(isinstance(x, str) for x in flat):
        return " ".join(repr(x) for x in flat)
    known = [float("nan") if x is None else float(x) for x in flat]
    if len(known) <= 2 * SHOWN:
        return " ".join(map(number, known))
    samples = [known[i] for i in np.linspace(0, len(known) - 1, SHOWN).round().astype(int)]
    finite = [x for x in known if np.isfinite(x)]
    mean = f"{len(known)}, mean {number(float(np.mean(finite)))}" if finite else f"{len(known)}"
    return f"{' '.join(map(number, samples))} of {mean}"
