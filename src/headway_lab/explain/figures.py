"""Figures of topics: panels side by side, each drawn from a report's columns. A topic's `draw` is `panels(...)`."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from headway_lab.draw import BLUE, GREEN, GREY, INK, ORANGE, RED, VIOLET
from headway_lab.explain.report import Report, Row, by_seed

Figure = Any  # matplotlib's, as Axes: matplotlib is imported only when a figure is written
Axes = Any
Panel = Callable[[Axes, Report], None]

COLOURS = {
    "blue": BLUE,
    "green": GREEN,
    "grey": GREY,
    "ink": INK,
    "orange": ORANGE,
    "red": RED,
    "violet": VIOLET,
}


def panels(*parts: Panel, layout: str = "", **rest: Any) -> Callable[[Figure, Report], None]:
    """Returns a topic's `draw`: panels side by side, or placed as A, B, C and so on by `layout`, with ";" between its
    rows ("AB;CC"); `rest` are arguments of `Figure.subplot_mosaic`."""
    rows = (layout or "ABCDEFGH"[: len(parts)]).split(";")

    def draw(figure: Figure, report: Report) -> None:
        figure.set_size_inches(max(8, 3 * len(rows[0]) + 3), 3.6 * len(rows))
        panes = figure.subplot_mosaic(";".join(rows), **rest)
        for name, part in zip(sorted(panes), parts, strict=True):
            part(panes[name], report)

    return draw


def curves(
    over: str,
    forms: Mapping[str, str],
    title: str,
    y: str = "",
    *,
    of: str = "",
    by: str = "",
    log: str = "",
    legend: Mapping[str, Any] | None = {},
    **properties: Any,
) -> Panel:
    """Returns a panel of a report's columns against the column `over`. `forms` has each column's format and colour ("o-
    red"). With `of`, only that column is drawn, as a curve for each value of the column `by`. A column with "NAME,
    least" and "NAME, most" also gets a line between these. `log` has the logarithmic axes: "x", "y" or "xy"; `title`,
    `y`, `legend` and `properties` as in `label_axes`."""

    def draw(axes: Axes, report: Report) -> None:
        for name, form in forms.items():
            column, (marks, _, colour) = of or name, form.partition(" ")
            rows = [row for row in report.rows if column in row and (not of or row[by] == name)]
            places = [row[over] for row in rows]
            axes.plot(places, [row[column] for row in rows], marks, color=COLOURS[colour], label=name)
            for place, row in zip(places, rows, strict=True):
                axes.vlines(place, *extent(row, column), color=COLOURS[colour])
        label_axes(axes, title, over, y, legend, **properties, **{f"{axis}scale": "log" for axis in log})
        if "x" in log:
            label_ticks(axes, sorted(set(report.column(over))))

    return draw


def bars(
    names: Sequence[str],
    column: str,
    title: str,
    x: str = "",
    *,
    pale: Callable[[Row], bool] = lambda row: False,
    line: float | None = None,
    **properties: Any,
) -> Panel:
    """Returns a panel with a bar for each combination of values of the columns `names`, the first on top: the mean of
    `column` over its rows, with a line from the least to the largest value of its seeds, or else of "COLUMN, least" and
    "COLUMN, most"; grey if `pale`; with a dashed line at `line`. `title`, `x`, `properties` as in `label_axes`."""

    def draw(axes: Axes, report: Report) -> None:
        rows: dict[str, list[Row]] = {}
        for row in report.rows:
            if column in row:
                rows.setdefault("\n".join(str(row[name]) for name in names), []).append(row)
        for label, group in rows.items():
            values = [value for row in group for value in (by_seed(row) or extent(row, column))]
            axes.barh(label, fmean(row[column] for row in group), color=GREY if pale(group[0]) else BLUE)
            axes.hlines(label, min(values), max(values), color=INK)
        if line is not None:
            axes.axvline(line, color=GREY, linestyle="--", linewidth=1.2)
        axes.yaxis.set_inverted(True)
        axes.grid(visible=False, axis="y")
        label_axes(axes, title, x or column, **properties)

    return draw


def translate(figure: Figure, say: Callable[[str], str]) -> None:
    """Translates every text on a figure: titles, labels, legends, and tick labels with words."""
    from matplotlib.text import Text

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        if (words := [say(label) for label in labels]) != labels:
            axis.set_ticks(axis.get_ticklocs(), words)
    for text in figure.findobj(Text):
        text.set_text(say(text.get_text()))


def extent(row: Row, column: str) -> tuple[float, float]:
    """Returns the least and the largest value of a column in a row: its columns "COLUMN, least" and "COLUMN, most", or
    itself."""
    return row.get(f"{column}, least", row[column]), row.get(f"{column}, most", row[column])


def label_axes(
    axes: Axes,
    title: str,
    x: str = "",
    y: str = "",
    legend: Mapping[str, Any] | None = None,
    **properties: Any,
) -> None:
    """Sets the title of a panel and the names of its axes, and `properties` as in `Axes.set`; with `legend`, arguments
    of `Axes.legend`, also adds a legend."""
    axes.set(title=title, xlabel=x, ylabel=y, **properties)
    if legend is not None:
        axes.legend(**legend)


def label_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Puts a labelled tick at each of `values` on a logarithmic x axis, and no others."""
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.set_xticks([], minor=True)


def bare(axes: Axes) -> None:
    """Removes frame, grid and tick marks, for panels of cells."""
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=7)
    axes.spines[:].set_visible(False)
