"""What became of a list of faults: a table by package, small ones pooled by floor, and those that no test noticed."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POOLED = 25
"""A package with fewer faults is pooled with the others of its floor."""
MOST_EQUIVALENT = 0.08
FLOORS = {
    "pure values, hardware": (
        "hardware processor threads language patterns tokens heads positions scores similarity metrics partial "
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
    """Faults of one package or pool, by what became of them."""

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
        """Noticed ones of those that change something."""
        real = self.faults - self.equivalent
        return (self.killed + self.timeout) / real if real else 1.0

    def add(self, other: "Count") -> None:
        for name in ("killed", "timeout", "lived", "equivalent"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def package(file: str) -> str:
    """src/headway/nn/block.py is of headway/nn, src/headway/report.py of headway/report."""
    if file.startswith(f"src/{KERNELS}/"):
        return KERNELS
    parts = Path(file).with_suffix("").parts
    return "/".join(parts[1:3])


def floor(name: str) -> str:
    """The floor of a package."""
    top, _, part = name.partition("/")
    if top != "headway":
        return LABORATORY
    if name == KERNELS:
        return "native"
    return next(title for title, parts in FLOORS.items() if part in parts.split())


def outcome(row: Mapping[str, Any], equivalent: Mapping[str, str]) -> str:
    return "equivalent" if row["outcome"] == "lived" and row["id"] in equivalent else row["outcome"]


def table(rows: list[dict[str, Any]], equivalent: Mapping[str, str] = {}) -> dict[str, Count]:
    """The counts of each package, and of each floor those of its small ones together."""
    packages: dict[str, Count] = defaultdict(Count)
    for row in rows:
        name, what = package(row["file"]), outcome(row, equivalent)
        setattr(packages[name], what, getattr(packages[name], what) + 1)
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
    """The report. ValueError where more than `MOST_EQUIVALENT` of the faults are said to change nothing."""
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
    for what, title in (("lived", "lived"), ("equivalent", "change nothing")):
        these = sorted(
            (r for r in rows if outcome(r, equivalent) == what), key=lambda r: (r["file"], r["line"])
        )
        if these:
            lines += [
                "",
                f"{len(these)} {title}:",
                *(survivor(row, equivalent.get(row["id"])) for row in these),
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
    """A file of lines `id reason`. ValueError where one has no reason."""
    result = {}
    for entry in path.read_text().splitlines() if path else ():
        if entry.strip() and not entry.startswith("#"):
            key, _, reason = entry.partition(" ")
            if not reason.strip():
                raise ValueError(f"{path}: {key} needs a reason in one line: id reason")
            result[key] = reason.strip()
    return result
