"""Listings that tests compare with what is kept in a file: what a topic reports and draws, the rows of a benchmark.

`python -m tests.listings` renews all of them, or `python -m tests.listings tests/explain` those of a folder; `git diff`
shows what has changed. Words must be the same, integers too; other numbers agree within a thousandth, or a unit of the
last digit that is printed; what is smaller than 1e-5 is rounding, and agrees within its size. The tests are run for
several instruction sets, and a number that is not the same for all of them is kept as ~, with which any agrees.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

RENEW = "TESTS_LISTINGS"
"""In the environment: "new" writes files, "more" marks in them the numbers that differ."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)|~")
CLOSE, ROUNDING, SIZE = 1e-3, 1e-5, 30
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
OLD = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
MACHINES: tuple[dict[str, str], ...] = (
    {},
    {**AVX2, "HEADWAY_NATIVE": "avx2"},
    {**OLD, "HEADWAY_NATIVE": "portable"},
)


class Clock:
    """Seconds that are the same in every run: each call is some milliseconds after the one before."""

    def __init__(self) -> None:
        self.calls, self.now = 0, 0.0

    def __call__(self) -> float:
        self.calls += 1
        self.now += 1e-3 * (1 + self.calls * 37 % 11 / 10)
        return self.now


def number(x: object) -> str:
    """A number to four digits; one that is no integer always has a point or an exponent."""
    if not isinstance(x, float):
        return str(x)
    text = f"{x:.4g}"
    return text if re.search("[.en]", text) else f"{text}.0"


def agree(kept: str, new: str) -> bool:
    """Whether two numbers, as text, are one."""
    if kept == new or "~" in (kept, new):
        return True
    if not re.search("[.e]", kept + new):
        return False
    a, b = (float(text.replace(",", "")) for text in (kept, new))
    if abs(a) < ROUNDING and abs(b) < ROUNDING:
        return abs(b) <= SIZE * abs(a) or abs(b) < 1e-12
    return abs(a - b) <= max(CLOSE * abs(a), 1.01 * max(unit(kept), unit(new)))


def unit(text: str) -> float:
    """One of the last digit of a number, as text."""
    digits, _, power = text.partition("e")
    return float(10 ** (int(power or 0) - len(digits.partition(".")[2])))


def differences(kept: str, new: str) -> Iterator[str]:
    """The lines that do not agree."""
    for one, other in zip_longest(kept.splitlines(), new.splitlines(), fillvalue="(nothing)"):
        words = NUMBER.sub("#", one) == NUMBER.sub("#", other)
        pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=words)
        if not (words and all(agree(*pair) for pair in pairs)):
            yield f"kept  {one}\nnow   {other}"


def merged(kept: str, new: str) -> str:
    """A listing with ~ for the numbers in which another differs."""
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", new), "\n".join(differences(kept, new))
    numbers = iter(NUMBER.findall(new))

    def one(match: re.Match[str]) -> str:
        return match[0] if agree(match[0], next(numbers)) else "~"

    return NUMBER.sub(one, kept)


def text(value: Any) -> str:
    """A value as Python writes it; of a dataclass the fields that are not as usual."""
    if isinstance(value, (set, frozenset)):
        return text(sorted(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(key)}: {text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"({', '.join(map(text, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({facts(value)})"
    return repr(value)


def facts(value: Any) -> str:
    """The fields of a dataclass that are not as usual."""
    usual = {field.name: field.default for field in fields(value)}
    return ", ".join(
        f"{name}={text(now)}"
        for name, default in usual.items()
        if (now := getattr(value, name)) != default and not _repeats(now, default)
    )


def _repeats(value: Any, default: Any) -> bool:
    """Whether a value of each layer is the default's one in all of them."""
    return isinstance(default, tuple) and len(default) == 1 and {*value} == {*default}


def constants(module: ModuleType) -> str:
    """What a module names in capitals."""
    body = ast.parse(inspect.getsource(module)).body
    targets = [one.targets for one in body if isinstance(one, ast.Assign)]
    targets += [[one.target] for one in body if isinstance(one, ast.AnnAssign) and one.value]
    names = [
        name.id for those in targets for one in those for name in ast.walk(one) if isinstance(name, ast.Name)
    ]
    capitals = [name for name in names if name.lstrip("_").isupper()]
    values = {name: text(getattr(module, name)) for name in capitals}
    return "\n".join(f"{name} = {value}" for name, value in values.items() if " at 0x" not in value)


def check(path: Path, listing: str) -> None:
    """Raises AssertionError where a listing is not that of the file."""
    text = "\n".join(line.rstrip() for line in listing.splitlines()) + "\n"
    if how := os.environ.get(RENEW):
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            merged(path.read_text(encoding="utf-8"), text) if how == "more" else text, encoding="utf-8"
        )
    found = [*differences(path.read_text(encoding="utf-8"), text)]
    assert not found, f"{path.name}, renewed by `python -m tests.listings`:\n" + "\n".join(found[:8])


def main(folders: list[str]) -> int:
    for how, machine in zip(("new", *["more"] * len(MACHINES)), (*MACHINES, MACHINES[0]), strict=True):
        print(how, machine, flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "-k",
            "as_listed",
            *(folders or ["tests"]),
        ]
        if code := subprocess.run(command, env={**os.environ, RENEW: how, **machine}).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
