"""Pictures: one look for every figure that headway writes. matplotlib's Agg canvas, no window."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, GREY, PALE = "#1d2733", "#8a94a0", "#e9edf1"
BLUE, ORANGE, GREEN, RED, VIOLET = "#2f6fb3", "#e08a1e", "#3c9b6b", "#c8453c", "#7a5bb0"

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
def saved_figure(path: Path, width: float = 8.0, height: float = 4.5) -> Iterator[Any]:
    """A matplotlib `Figure` in headway's look, written to `path` when the block ends without an error.

    `width` and `height` in inches. The kind of file follows the name: png, svg, pdf."""
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = cycler(color=[BLUE, ORANGE, GREEN, RED, VIOLET, GREY])
    with matplotlib.rc_context({**STYLE, "axes.prop_cycle": colours}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
