"""One result of a bench, as a line of JSON and as text for a terminal."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from headway import processor
from headway.cores import cores
from headway.native.loader import search
from headway.report import cell, plain, table
from headway_lab.bench.inputs import OURS
from headway_lab.profiling import Exponent


@dataclass(frozen=True)
class Row:
    """A result. `rate` is useful work per second (FLOP/s, or bytes/s if `bound` is "reads"); `ratios` are the times of
    the peers over headway's. If nothing could be measured, the numbers are None and `notes` say why."""

    bench: str
    case: str
    dtype: str
    bound: str = "products"
    ours_ms: float | None = None
    rate: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    share_of_limit: float | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        notes: list[str] = self.machine.get("notes", [])
        return notes

    @property
    def ratio_best_peer(self) -> float | None:
        """The time of the fastest peer over headway's. Another case of headway's counts only if there are no other
        peers."""
        peer_ratios = {name: value for name, value in self.ratios.items() if not name.startswith(OURS)}
        return min((peer_ratios or self.ratios).values(), default=None)

    def to_json(self) -> dict[str, Any]:
        """Returns the row with exactly the keys that docs/benchmarks.md lists."""
        unit = "ours_gbs" if self.bound == "reads" else "ours_gflops"
        return {
            "bench": self.bench,
            "case": self.case,
            "dtype": self.dtype,
            "ours_ms": self.ours_ms,
            unit: None if self.rate is None else self.rate / 1e9,
            "peers": self.peers,
            "ratio_best_peer": self.ratio_best_peer,
            "share_of_limit": self.share_of_limit,
            **self.extra,
            "machine": self.machine,
        }

    def summary(self) -> str:
        """Returns the row in a few words: what was measured, milliseconds, and how long the best peer takes."""
        if self.ours_ms is None:
            return f"{self.case} {self.dtype}: not measured"
        peer = self.ratio_best_peer
        beside = "" if peer is None else f", the best peer takes {_times(peer)}"
        return f"{self.case} {self.dtype}: {cell(self.ours_ms)} ms{beside}"

    def to_line(self) -> str:
        """Returns the row as one line of JSON."""
        return json.dumps(plain(self.to_json()), ensure_ascii=False, allow_nan=False)


def machine(backend: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Returns processor, threads and versions of this process, and the requested backend, in JSON's types."""
    kernels = search().library
    return {
        "cpu": processor.cpu_name(),
        "cores": cores(),
        "native": kernels.level if kernels is not None else None,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("headway", "torch", "transformers")},
        "backend": backend,
        "notes": list(notes),
    }


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def to_text(rows: Sequence[Row]) -> str:
    """Returns the machine, a table for each bench, and the notes."""
    parts = []
    for bench in dict.fromkeys(row.bench for row in rows):
        bench_rows = [row for row in rows if row.bench == bench]
        parts += [_where(bench_rows), TABLES.get(bench, _rates)(bench_rows), _notes(bench_rows)]
    return "\n\n".join(part for part in parts if part)


def _where(rows: Sequence[Row]) -> str:
    info = next((row.machine for row in rows if "cpu" in row.machine), {})
    threads = sorted({row.machine["threads"] for row in rows if "threads" in row.machine})
    return (
        f"{info.get('cpu', 'unknown processor')}, {' and '.join(map(str, threads))} "
        f"{'thread' if threads == [1] else 'threads'}, torch {info.get('torch')}, "
        f"native kernels: {info.get('native') or 'no library'}, backend {info.get('backend')}"
    )


def _notes(rows: Sequence[Row]) -> str:
    """Returns every note once, with the rows that it belongs to."""
    rows_of: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            rows_of.setdefault(note, []).append(f"{row.case} {row.dtype}")
    return "\n".join(f"  * {', '.join(dict.fromkeys(names))}: {note}" for note, names in rows_of.items())


def _rates(rows: Sequence[Row]) -> str:
    several = len({row.machine.get("threads") for row in rows}) > 1
    body = [
        {
            "case": _starred(row),
            "dtype": {"float32": "fp32", "bfloat16": "bf16"}.get(row.dtype, row.dtype),
            "threads": row.machine.get("threads") if several else None,
            "ms": row.ours_ms,
            "tokens/s": row.extra.get("tokens_per_second"),
            "rate": _rate(row),
            "of limit": f"{row.share_of_limit:.0%}" if row.share_of_limit is not None else "",
            "best peer": _times(row.ratio_best_peer),
            "peers (ms)": _listed(row.peers),
            "peak MiB": row.extra.get("ours_mib"),
            "peers (MiB)": _listed(row.extra.get("peers_mib", {})),
        }
        for row in rows
    ]
    names = sorted({row.machine["limit"] for row in rows if "limit" in row.machine})
    limits = f"\n  of limit: {' or '.join(names)}, measured in the same turns" if names else ""
    return _table(body) + limits


def _growth(rows: Sequence[Row]) -> str:
    verdicts = [line for row in rows for line in row.extra.get("verdicts", ())]
    return "\n\n".join(part for part in (_forms(rows), *verdicts) if part)


def _forms(rows: Sequence[Row]) -> str:
    """Returns a line for each form: its longest length, its memory and time there, how both grow, and what stopped
    it."""
    body = [
        {
            "form": row.case,
            "longest n": row.extra["n"][-1],
            "MiB": row.extra["mib"][-1],
            "ms": row.extra["ms"][-1],
            "memory": _fit(row.extra["memory_exponent"]),
            "time": _fit(row.extra["time_exponent"]),
            "stopped": f"at n={row.extra['stopped_at']} by {row.extra['stopped_by']}"
            if row.extra["stopped_by"]
            else "",
        }
        for row in rows
        if row.extra.get("n")
    ]
    return _table(body) + "\n  fitted to the last four lengths, ± a standard error" if body else ""


def _served(rows: Sequence[Row]) -> str:
    """Returns a line for each server of each row."""
    body = [
        {
            "case": row.case,
            "server": name,
            **figures,
            "peer takes": "" if name != OURS else _times(row.ratio_best_peer),
        }
        for row in rows
        for name, figures in row.extra.get("figures", {}).items()
    ]
    names = list(dict.fromkeys(name for line in body for name in line))
    return _table([{name: line.get(name) for name in names} for line in body]) if body else ""


TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {"growth": _growth, "serve": _served}
"""The table functions of benches whose rows are not rates."""


def _fit(fit: Exponent | None) -> str:
    return "" if fit is None else str(fit)


def _table(body: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the columns that are not empty."""
    names = [name for name in body[0] if any(row[name] not in (None, "") for row in body)]
    return table(names, [[row[name] for name in names] for row in body])


def _rate(row: Row) -> str:
    return f"{row.rate / 1e9:.4g} {'GB/s' if row.bound == 'reads' else 'GFLOP/s'}" if row.rate else ""


def _starred(row: Row) -> str:
    return row.case + (" *" if row.notes else "")


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
