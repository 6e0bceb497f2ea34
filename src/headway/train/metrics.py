"""The log of a run: metrics.jsonl, the plot of it, and progress on stderr."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from headway.storage.files import atomic_write
from headway.train.trackers import Write

METRICS, CURVE = "metrics.jsonl", "loss.png"
SILENCE = 60.0  # seconds of training after which a progress line is printed in any case


class MetricsLog:
    """Writer of metrics.jsonl, one JSON object per line. On resume (after the step `after`), lines of later steps are
    dropped, so that every step is there once. Each line is also passed to `send`, for trackers. Only one process of a
    run `writes`; in the others nothing happens."""

    def __init__(self, path: Path, after: int | None = None, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.send: Write = lambda record: None
        if not writes:
            return
        records: list[dict[str, Any]] = []
        if after is not None and path.exists():
            records = [r for r in read_metrics(path) if "step" in r and r["step"] <= after]
        atomic_write(
            path, "".join(map(_line, records))
        )  # atomic: a process that dies here loses none of them

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line; numbers that are not finite become null."""
        if not self.writes:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        self.send(record)


def _line(record: Mapping[str, Any]) -> str:
    finite = {k: (None if isinstance(v, float) and v - v != 0 else v) for k, v in record.items()}
    return json.dumps(finite) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads all complete lines. A line that a dying process truncated has no bracket at its end and is skipped."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


class Reporter:
    """Progress of a run on stderr: a live bar on a terminal; elsewhere one line every `every` steps, and whenever
    `SILENCE` seconds of training have passed without one. Nothing if `quiet`. A context manager, which ends the bar."""

    def __init__(
        self, total: int | None, every: int, *, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.total, self.every, self.quiet = total, every, quiet
        self.stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._last_line = 0.0  # seconds of training at the last line of a step
        if not quiet and self.stream.isatty():
            count = MofNCompleteColumn() if total else TextColumn("step {task.fields[step]}")
            columns = (count, BarColumn(bar_width=12), TextColumn("{task.description}"))
            # rich prints redirected stdout above the bar: only right if stdout is the terminal, too.
            console, here = Console(file=self.stream), sys.stdout.isatty()
            self._bar = Progress(*columns, console=console, redirect_stdout=here)
            self._task = self._bar.add_task("", total=total, step=0)
            self._bar.start()

    def step(self, record: dict[str, Any]) -> None:
        """Shows the progress after a step; `record` is its line of metrics.jsonl."""
        if self._bar is not None:
            done, total = record["step"], self.total
            if total is None:  # a run with a time limit fills its bar by time
                done, total = record["seconds"], record["seconds"] + record["eta_s"]
            description = summary(record, short=True)
            with self._unread():
                self._bar.update(
                    self._task, completed=done, total=total, description=description, step=record["step"]
                )
        elif (
            record["step"] % self.every == 0
            or record["step"] == self.total
            or record["seconds"] - self._last_line >= SILENCE
        ):
            self._last_line = record["seconds"]
            of = f"/{self.total}" if self.total else ""
            self.note(f"step {record['step']}{of}  {summary(record)}")

    @contextmanager
    def _unread(self) -> Iterator[None]:
        """Becomes quiet instead of raising OSError if the terminal was closed, or the pipe's reader has ended: neither
        must end the run."""
        try:
            yield
        except OSError:
            self.quiet, self._bar = True, None

    def note(self, text: str) -> None:
        """Prints a remark on a line of its own."""
        with self._unread():
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False)
            elif not self.quiet:
                print(text, file=self.stream, flush=True)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._unread():
            if self._bar is not None:
                self._bar.stop()


def summary(record: dict[str, Any], *, short: bool = False) -> str:
    """Returns `loss 3.412  1.71 bits/byte  5321 tok/s  lr 2.1e-03  |g| 0.82  eta 3:20`; if `short`, without lr and |g|,
    so that it fits beside a bar on 80 columns."""
    parts = ["loss -" if record["loss"] is None else f"loss {record['loss']:.3f}"]
    if record.get("bits_per_byte") is not None:
        parts.append(f"{record['bits_per_byte']:.3f} bits/byte")
    if record.get("accuracy") is not None:
        parts.append(f"accuracy {record['accuracy']:.3f}")
    parts.append(f"{record['tokens_per_s']:.0f} tok/s")
    if not short:
        parts += [f"lr {record['lr']:.2e}", f"|g| {record['grad_norm']:.2f}"]
    return "  ".join([*parts, f"eta {clock(record['eta_s'])}"])


def clock(seconds: float) -> str:
    """Returns a duration as 3:20 or 1:03:20."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def draw_curve(records: list[dict[str, Any]], path: Path, title: str, unit: str = "token") -> None:
    """Plots bits per byte (or the loss per `unit`, if there are none) over steps as a PNG: every step, their running
    mean, and held-out values."""
    from matplotlib.figure import Figure

    measure = "bits_per_byte" if any(r.get("bits_per_byte") is not None for r in records) else "loss"
    steps, held_out = (
        [(r["step"], r[name]) for r in records if "step" in r and r.get(name) is not None]
        for name in (measure, f"val_{measure}")
    )
    figure = Figure(figsize=(8, 4.5), dpi=120)  # an automatic layout would draw it twice
    axes = figure.add_axes((0.09, 0.11, 0.89, 0.81))
    if steps:
        step_numbers, values = map(list, zip(*steps, strict=True))
        axes.plot(step_numbers, values, color="#9ecae1", linewidth=0.8, label="training, each step")
        axes.plot(
            step_numbers, running_mean(values), color="#08519c", linewidth=1.8, label="training, running mean"
        )
    if held_out:
        color = "#d94801"
        axes.plot(*zip(*held_out, strict=True), "o-", color=color, markersize=5, label="held out")
        text = f"{held_out[-1][1]:.3f}"
        axes.annotate(text, held_out[-1], xytext=(-6, 8), textcoords="offset points", ha="right", color=color)
    if steps:  # the first steps may lie above the top; set last, since this ends autoscaling
        late = [*values[len(values) // 20 :], *(v for _, v in held_out)]
        axes.set_ylim(top=max(late) + 0.1 * (max(late) - min(late)) + 1e-3)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("bits per byte" if measure == "bits_per_byte" else f"loss, nats per {unit}")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right")  # loc="best" would check every point
    figure.savefig(path)


def running_mean(values: list[float]) -> list[float]:
    """Returns, for each step, the mean of a window centred on it: about a twentieth of the run, narrower at its ends.
    Since the window is symmetric, the mean does not lag behind a falling curve."""
    sums, half = [0.0, *accumulate(values)], len(values) // 40
    reach = [min(i, len(values) - 1 - i, half) for i in range(len(values))]
    return [(sums[i + r + 1] - sums[i - r]) / (2 * r + 1) for i, r in enumerate(reach)]
