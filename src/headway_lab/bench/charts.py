"""Charts of the rows: rates relative to the limit, scaling over threads, growth over the length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway_lab.bench.rows import Row
from headway_lab.draw import BLUE, GREEN, GREY, INK, ORANGE, RED, VIOLET, saved_figure

CYAN, PINK, BROWN = "#3aa6b9", "#c9659b", "#8c6d4f"
COLOURS = {
    "full": RED,
    "mask": RED,
    "sdpa": GREY,
    "sdpa + mask": INK,
    "causal": PINK,
    "linear": BROWN,
    "loop": ORANGE,
    "chunks": VIOLET,
    "banded": CYAN,
    "native": BLUE,
    "flex": GREEN,
    "rows": ORANGE,
    "rows-sdpa": GREY,
    "gqa": RED,
}
"""The colours of peers and forms."""
OTHER = "headway, the case that it is compared with"


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Writes attention.png, scaling.png and growth.png, each only if there are rows for it. Returns the files."""
    measured = [row for row in rows if row.ours_ms is not None]
    attention = [row for row in measured if row.bench == "attention"]
    charts = {
        "attention.png": (rates, attention, max(3.0, 0.34 * len(attention) + 1.5)),
        "scaling.png": (scaling, _at_several(attention), 4.2),
        "growth.png": (growth, [row for row in measured if row.bench == "growth"], 4.6),
    }
    chosen = {out / name: chart for name, chart in charts.items() if chart[1]}
    for path, (plot, chart_rows, height) in chosen.items():
        with saved_figure(path, 9.0, height) as figure:
            plot(figure, chart_rows)
    return list(chosen)


def rates(figure: Any, rows: Sequence[Row]) -> None:
    """Draws a bar per row, headway's share of the limit, and a mark per peer."""
    axes = figure.subplots()
    places = list(range(len(rows)))[::-1]
    axes.barh(places, [row.share_of_limit or 0 for row in rows], height=0.6, color=BLUE, label="headway")
    labelled: set[str] = set()
    for place, row in zip(places, rows, strict=True):
        for peer, ratio in row.ratios.items():
            share, kind = (row.share_of_limit or 0) / ratio, OTHER if peer.startswith("headway ") else peer
            label = None if kind in labelled else kind
            axes.plot(share, place, "D", ms=5, color=COLOURS.get(kind, "black"), label=label)
            labelled.add(kind)
    axes.set_yticks(places, [_name(row) for row in rows], fontsize=7)
    axes.set(
        xlim=(0, 1),
        ylim=(-1, len(rows)),
        xlabel="share of the limit measured in the same turn",
        title="attention beside its peers",
    )
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def scaling(figure: Any, rows: Sequence[Row]) -> None:
    """Draws the rate over threads, a line per case."""
    axes = figure.subplots()
    for name in dict.fromkeys(_name(row, threads=False) for row in rows):
        series = [row for row in rows if _name(row, threads=False) == name]
        threads = [row.machine["threads"] for row in series]
        axes.plot(threads, [(row.rate or 0) / (series[0].rate or 1) for row in series], "o-", label=name)
    most_threads = max(row.machine["threads"] for row in rows)
    axes.plot([1, most_threads], [1, most_threads], color=GREY, lw=1, ls="--", label="as many times as fast")
    axes.set(xlabel="threads", ylabel="times as fast as the first", title="scaling")
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))


def growth(figure: Any, rows: Sequence[Row]) -> None:
    """Draws, on the left, the memory of a step of each form over the length, with the limit, and a cross where it was
    stopped there; on the right its time. Dashed lines are full attention or a mask over all pairs, which grow
    quadratically."""
    left, right = figure.subplots(1, 2)
    for row in rows:
        curve, name = row.extra, row.case
        style = "o--" if curve["quadratic"] else "o-"
        for axes, key, power in ((left, "mib", "memory_exponent"), (right, "ms", "time_exponent")):
            text = curve[power] and f"{name}  n^{curve[power][0]:.2f}"
            text = f"{text or name}, stopped in preparing" if curve["stopped_in"] else text
            axes.loglog(curve["n"], curve[key], style, ms=4, color=COLOURS[name], label=text or name)
        if curve["stopped_by"] == "memory":
            segment = ([curve["n"][-1], curve["stopped_at"]], [curve["mib"][-1], curve["limit_mib"]])
            if not curve["stopped_in"]:
                left.loglog(*segment, ":", lw=1, color=COLOURS[name])
            left.loglog(curve["stopped_at"], curve["limit_mib"], "x", ms=8, mew=2, color=COLOURS[name])
    limit = rows[0].extra["limit_mib"]
    left.axhline(limit, color=INK, lw=1)
    left.text(
        0.01, limit, f"limit, {limit:,} MiB", transform=left.get_yaxis_transform(), va="bottom", fontsize=7
    )
    left.set(title="memory of inputs and step", ylabel="MiB")
    right.set(title="time of a step", ylabel="ms")
    for axes in (left, right):
        lengths = sorted({n for row in rows for n in row.extra["n"]})
        axes.set_xticks(lengths, [f"{n / 1024:g}k" for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("tokens")
        axes.legend(fontsize=7)


def _at_several(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that were measured at more than one number of threads."""
    threads_of: dict[str, set[int]] = {}
    for row in rows:
        threads_of.setdefault(_name(row, threads=False), set()).add(row.machine.get("threads", 0))
    return [row for row in rows if len(threads_of[_name(row, threads=False)]) > 1]


def _name(row: Row, threads: bool = True) -> str:
    text = f"{row.case} {row.dtype}"
    return f"{text} ({row.machine['threads']} t)" if threads else text
