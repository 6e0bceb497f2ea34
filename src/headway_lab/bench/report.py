"""Rows as text for a terminal, and as the lines of a file."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.report import plain, table
from headway_lab.bench.rows import Row

RESULTS = Path("bench/results")


def line(row: Row) -> str:
    """One row as one line of JSON."""
    return json.dumps(plain(row.to_json()), ensure_ascii=False, allow_nan=False)


def save(rows: Sequence[Row], folder: Path = RESULTS) -> Path:
    """Append the rows to `folder`/DATE-CPU.jsonl."""
    cpu = re.sub(r"[^a-z0-9]+", "-", str(rows[0].machine.get("cpu", "unknown")).lower()).strip("-")
    path = folder / f"{datetime.date.today().isoformat()}-{cpu}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(line(row) + "\n" for row in rows)
    return path


def text(rows: Sequence[Row]) -> str:
    """Where it was measured, a table for each bench, and the notes."""
    parts = []
    for bench in dict.fromkeys(row.bench for row in rows):
        some = [row for row in rows if row.bench == bench]
        parts.append(_where(some))
        parts.append(_held(some) if bench == "memory" else _rates(some))
        parts.append(_notes(some))
    return "\n\n".join(part for part in parts if part)


def _notes(rows: Sequence[Row]) -> str:
    """Every note once, with the rows that it is about."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            about.setdefault(note, []).append(f"{row.case} {row.dtype}")
    return "\n".join(f"  * {', '.join(dict.fromkeys(names))}: {note}" for note, names in about.items())


def _where(rows: Sequence[Row]) -> str:
    where = next((row.machine for row in rows if "cpu" in row.machine), {})
    threads = sorted({row.machine["threads"] for row in rows if "threads" in row.machine})
    count = " and ".join(map(str, threads))
    native = where.get("native") or "no library"
    return (
        f"{where.get('cpu', 'unknown processor')}, {count} {'thread' if threads == [1] else 'threads'}, "
        f"torch {where.get('torch')}, native kernels: {native}, backend {where.get('backend')}"
    )


def _rates(rows: Sequence[Row]) -> str:
    several = len({row.machine.get("threads") for row in rows}) > 1
    body: list[list[Any]] = []
    for row in rows:
        unit = "GB/s" if row.bound == "reads" else "GFLOP/s"
        times = ", ".join(f"{name} {value:.4g}" for name, value in row.peers.items())
        body.append(
            [
                row.case + (" *" if row.notes else ""),
                {"float32": "fp32", "bfloat16": "bf16"}.get(row.dtype, row.dtype),
                *([row.machine.get("threads")] if several else []),
                row.ours_ms,
                f"{row.rate / 1e9:.4g} {unit}" if row.rate else "",
                f"{row.share_of_limit:.0%}" if row.share_of_limit is not None else "",
                _times(row.ratio_best_peer),
                _times(row.ratio_best_tuned),
                times,
            ]
        )
    threads = ["threads"] if several else []
    columns = ["case", "dtype", *threads, "ms", "rate", "of limit", "best peer", "tuned", "peers (ms)"]
    names = sorted({row.machine["limit"] for row in rows if "limit" in row.machine})
    limits = f"  of limit: {' or '.join(names)}, measured in the same turns" if names else ""
    return table(columns, body) + ("\n" + limits if limits else "")


def _held(rows: Sequence[Row]) -> str:
    body = []
    fits = []
    for row in rows:
        if "ours_mib" in row.extra:
            body.append(
                [
                    row.case + (" *" if row.notes else ""),
                    row.dtype,
                    row.extra["ours_mib"],
                    ", ".join(f"{name} {value:.4g}" for name, value in row.extra["peers_mib"].items()),
                    row.ours_ms,
                    ", ".join(f"{name} {value:.4g}" for name, value in row.peers.items()),
                ]
            )
        for side in row.extra.get("time_exponent", {}):
            held = row.extra["memory_exponent"][side]
            fits.append(
                [
                    f"{row.case}, {side}",
                    row.dtype,
                    f"n^{row.extra['time_exponent'][side]:.2f}",
                    "flat" if held is None else f"n^{held:.2f}",
                    f"{row.extra['bytes_per_token'][side]:.0f}",
                ]
            )
    parts = []
    if body:
        columns = ("case", "dtype", "MiB beyond", "peers (MiB)", "ms", "peers (ms)")
        parts.append(table(columns, body) + "\n  MiB beyond: held beyond inputs and outputs")
    if fits:
        parts.append(table(("fitted", "dtype", "time", "memory", "bytes per token"), fits))
    return "\n\n".join(parts)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
