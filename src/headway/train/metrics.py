"""What a run writes down about itself: metrics.jsonl, and the picture of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoints.storage.files import atomic_write

METRICS, CURVE = "metrics.jsonl", "loss.png"


class MetricsLog:
    """One JSON object per line, flushed line by line. On resume, what is later than the checkpoint is dropped,
    so that every step is there once. A context manager: the file is closed in the end."""

    def __init__(self, path: Path, after: int | None = None) -> None:
        self.path = path
        kept: list[dict[str, Any]] = []
        if after is not None and path.exists():
            kept = [r for r in read_metrics(path) if "step" in r and r["step"] <= after]
        atomic_write(path, "".join(map(_line, kept)))  # a process that dies here loses none of them
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; numbers that are not finite become null."""
        self._file.write(_line(record))
        self._file.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    clean = {k: (None if isinstance(v, float) and v - v != 0 else v) for k, v in record.items()}
    return json.dumps(clean) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; one that a dying process cut off is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def draw_curve(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Bits per byte (or loss, where there are none) over steps as a PNG: every step, their running mean, and the
    held-out text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit = "bits_per_byte" if any(r.get("bits_per_byte") is not None for r in records) else "loss"
    steps = [(r["step"], r[unit]) for r in records if "step" in r and r.get(unit) is not None]
    held = [(r["step"], r[f"val_{unit}"]) for r in records if "step" in r and f"val_{unit}" in r]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if steps:
        at, values = [s for s, _ in steps], [v for _, v in steps]
        axes.plot(at, values, color="#9ecae1", linewidth=0.8, label="training, each step")
        axes.plot(at, _smooth(values), color="#08519c", linewidth=1.8, label="training, running mean")
        late = [*values[len(values) // 20 :], *(v for _, v in held)]  # the fall of the first steps may leave
        axes.set_ylim(top=max(late) + 0.1 * (max(late) - min(late)) + 1e-3)
    if held:
        axes.plot(
            [s for s, _ in held], [v for _, v in held], "o-", color="#d94801", markersize=5, label="held out"
        )
        axes.annotate(
            f"{held[-1][1]:.3f}",
            held[-1],
            textcoords="offset points",
            xytext=(-6, 8),
            ha="right",
            color="#d94801",
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("bits per byte" if unit == "bits_per_byte" else "loss, nats per token")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    figure.savefig(path)


def _smooth(values: list[float]) -> list[float]:
    """Exponential running mean over about a twentieth of the run, without its bias towards the first value."""
    rate = 1.0 / max(1.0, len(values) / 20)
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean += rate * (value - mean)
        weight += rate * (1.0 - weight)
        out.append(mean / weight)
    return out
