"""What several figures of `explain` draw alike."""

from collections.abc import Mapping, Sequence
from typing import Any

from headway_lab.explain.report import Report

SMALLEST = 1e-17
LOG_LOG = {"xscale": "log", "yscale": "log"}


def panels(figure: Any, width: float, height: float, count: int = 2, **rest: Any) -> Any:
    """`count` panels side by side, on a figure of that size in inches; `rest` as in `Figure.subplots`."""
    figure.set_size_inches(width, height)
    return figure.subplots(1, count, **rest)


def curves(
    axes: Any, report: Report, x: str, columns: Mapping[str, tuple[str, str, str]], **properties: Any
) -> None:
    """Columns of a report over its column `x`, with a legend: by label, each column's name, its format and colour.
    `properties` as in `Axes.set`; a logarithmic x axis has a tick at each value."""
    for label, (name, form, colour) in columns.items():
        axes.plot(report.column(x), report.column(name), form, color=colour, label=label)
    axes.set(**properties)
    axes.legend()
    if properties.get("xscale") == "log":
        label_ticks(axes, report.column(x))


def label_ticks(axes: Any, values: Sequence[float], axis: str = "x") -> None:
    """A tick with its number at each of `values` of a logarithmic axis, and no others."""
    getattr(axes, f"set_{axis}ticks")(values, [f"{value:,}" for value in values])
    getattr(axes, f"set_{axis}ticks")([], minor=True)


def log_bars(axes: Any, names: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    """Horizontal bars on a logarithmic axis, the first on top; a zero has no length."""
    lengths = [max(value, SMALLEST) - SMALLEST for value in values]
    axes.barh(names[::-1], lengths[::-1], left=SMALLEST, color=colours[::-1])
    axes.set(xscale="log")
    axes.grid(visible=False, axis="y")


def error_bars(means: Sequence[float], least: Sequence[float], most: Sequence[float]) -> list[list[float]]:
    """From the means down to the least and up to the most, as matplotlib wants them."""
    below = [mean - low for mean, low in zip(means, least, strict=True)]
    return [below, [high - mean for mean, high in zip(means, most, strict=True)]]


def bare(axes: Any) -> None:
    """No frame, no grid, no tick marks: for panels of cells."""
    axes.grid(visible=False)
    axes.tick_params(length=0, labelsize=7)
    for spine in axes.spines.values():
        spine.set_visible(False)
