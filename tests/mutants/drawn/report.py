"""The report of a run: a table by package, small packages pooled by floor, and the faults that lived."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POOLED = 25
"""A package with fewer faults is pooled with other small ones of its floor."""
MOST_EQUIVALENT = 0.08
FLOORS = {
    "pure values, hardware": (
        "hardware cores processor threads language patterns tokens heads positions scores similarity metrics partial "
        "quantization block_quantization choice errors"
    ),
    "native": "native storage report fonts",
    "attention": "attention",
    "nn, cache, parallel": "parallel cache nn",
    "models": "models",
    "checkpoints, text, data": "checkpoints text data",
    "train, generate, surgery": "train generate surgery",
    "faces": "api integrations compat classic endpoints recipes instruct judge serve cli __main__ __init__",
}
LABORATORY = "laboratory"
KERNELS = "headway/native/csrc"


@dataclass
class Count:
    """Numbers of faults of one package or pool, by outcome."""

    killed: int = 0
    timeout: int = 0
    lived: int = 0
    equivalent: int = 0
    parts: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return self.killed + self.timeout + self.lived + self.equivalent

    @property
    def score(self) -> float:
        """Share of noticed faults among those that change something."""
        real = self.faults - self.equivalent
        return (self.killed + self.timeout) / real if real else 1.0

    def add(self, other: "Count") -> None:
        for name in ("killed", "timeout", "lived", "equivalent"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def package(file: str) -> str:
    """Returns a file's package: headway/nn for src/headway/nn/block.py, headway/report for src/headway/report.py."""
    if file.startswith(f"src/{KERNELS}/"):
        return KERNELS
    parts = Path(file).with_suffix("").parts
    return "/".join(parts[1:3])


def floor(name: str) -> str:
    """Returns the floor of a package."""
    top, _, part = name.partition("/")
    if top != "headway":
        return LABORATORY
    if name == KERNELS:
        return "native"
    return next(title for title, parts in FLOORS.items() if part in parts.split())


def outcome(row: Mapping[str, Any], equivalent: Mapping[str, str]) -> str:
    return "equivalent" if row["outcome"] == "lived" and row["id"] in equivalent else row["outcome"]


def table(rows: list[dict[str, Any]], equivalent: Mapping[str, str] = {}) -> dict[str, Count]:
    """Returns the counts of each large package, and for each floor those of its small packages together."""
    packages: dict[str, Count] = defaultdict(Count)
    for row in rows:
        name, result_name = package(row["file"]), outcome(row, equivalent)
        setattr(packages[name], result_name, getattr(packages[name], result_name) + 1)
    result: dict[str, Count] = {}
    for name, count in sorted(packages.items()):
        large = count.faults >= POOLED or name == KERNELS
        title = name if large else f"{floor(name)} (small)"
        pool = result.setdefault(title, Count())
        pool.add(count)
        if not large:
            pool.parts.append(f"{name} {count.faults}")
    return result


def text(rows: list[dict[str, Any]], equivalent: Mapping[str, str] = {}) -> str:
    """Returns the report. Raises ValueError if more than `MOST_EQUIVALENT` of the faults are called equivalent."""
    rows = [row for row in rows if row["outcome"] in ("killed", "lived", "timeout")]
    claimed = sum(outcome(row, equivalent) == "equivalent" for row in rows)
    if claimed > MOST_EQUIVALENT * len(rows):
        raise ValueError(
            f"{claimed} of {len(rows)} faults are said to change nothing; at most {MOST_EQUIVALENT:.0%} may"
        )
    counts = table(rows, equivalent)
    total = Count()
    for count in counts.values():
        total.add(count)
    width = max(map(len, (*counts, "in all")))
    lines = [f"{'':{width}}  faults  killed  timeout  lived  equivalent  score"]
    for name, c in [*counts.items(), ("in all", total)]:
        lines.append(
            f"{name:{width}}  {c.faults:6}  {c.killed:6}  {c.timeout:7}  {c.lived:5}  {c.equivalent:10}  {c.score:5.1%}"
        )
    lines += [f"{name}: {', '.join(c.parts)}" for name, c in counts.items() if c.parts]
    for result_name, title in (("lived", "lived"), ("equivalent", "change nothing")):
        listed = sorted(
            (r for r in rows if outcome(r, equivalent) == result_name), key=lambda r: (r["file"], r["line"])
        )
        if listed:
            lines += [
                "",
                f"{len(listed)} {title}:",
                *(survivor(row, equivalent.get(row["id"])) for row in listed),
            ]
    return "\n".join(lines)


def survivor(row: Mapping[str, Any], reason: str | None = None) -> str:
    old, new = (" ".join(row[key].split()) or "(nothing)" for key in ("old", "new"))
    ran = f"{row.get('ran', 0)} tests ran" if row.get("ran") else "no test runs it"
    left = f", {row['left_out']} left out" if row.get("left_out") else ""
    why = f"; {reason}" if reason else ""
    return (
        f"{row['id']:10} {row['file']}:{row['line']}  {row['operator']}: {old} -> {new}  ({ran}{left}{why})"
    )


def reasons(path: Path | None) -> dict[str, str]:
    """Reads a file of lines `id reason`. Raises ValueError if a line has no reason."""
    result = {}
    for entry in path.read_text().splitlines() if path else ():
        if entry.strip() and not entry.startswith("#"):
            key, _, reason = entry.partition(" ")
            if not reason.strip():
                raise ValueError(f"{path}: {key} needs a reason in one line: id reason")
            result[key] = reason.strip()
    return result
