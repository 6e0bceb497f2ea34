"""Progress on stderr: a live bar on a terminal, one line every N steps elsewhere."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Reporter:
    """Says where the run is. `quiet` says nothing at all. A context manager: the live bar ends with it."""

    def __init__(
        self, total: int | None, every: int, *, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self.total, self.every, self.quiet = total, every, quiet
        self.stream = stream or sys.stderr
        self._bar: Progress | None = None
        if not quiet and self.stream.isatty():
            count = MofNCompleteColumn() if total else TextColumn("step {task.fields[step]}")
            columns = (count, BarColumn(bar_width=12), TextColumn("{task.description}"))
            # What is printed to a stdout that goes elsewhere must go there, not above the bar.
            console, here = Console(file=self.stream), sys.stdout.isatty()
            self._bar = Progress(*columns, console=console, redirect_stdout=here)
            self._task = self._bar.add_task("", total=total, step=0)
            self._bar.start()

    def step(self, record: dict[str, Any]) -> None:
        """After a step; `record` is its line of metrics.jsonl."""
        if self.quiet:
            return
        if self._bar is not None:
            done, total = record["step"], self.total
            if total is None:  # a run by the clock fills its bar by the clock
                done, total = record["seconds"], record["seconds"] + record["eta_s"]
            said = summary(record, short=True)
            self._bar.update(self._task, completed=done, total=total, description=said, step=record["step"])
            return
        if record["step"] % self.every == 0 or record["step"] == self.total:
            of = f"/{self.total}" if self.total else ""
            self.note(f"step {record['step']}{of}  {summary(record)}")

    def note(self, text: str) -> None:
        """A remark on a line of its own."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def summary(record: dict[str, Any], *, short: bool = False) -> str:
    """`loss 3.412  1.71 bits/byte  5321 tok/s  lr 2.1e-03  |g| 0.82  eta 3:20`; `short` fits a bar on 80
    columns."""
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
    """3:20, or 1:03:20."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
