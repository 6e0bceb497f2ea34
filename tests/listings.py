"""Listings that tests compare with kept files: what a topic reports and draws, the rows of a benchmark.

`python -m tests.listings` renews all of them, or `python -m tests.listings tests/explain` those of a folder; `git diff`
shows what has changed. Words and integers must be equal; other numbers agree within a thousandth, or a unit of the last
printed digit; numbers below 1e-5 are rounding, and agree within a factor of `SIZE`. The tests run for several
instruction sets, and a number that differs between them is kept as ~, which agrees with any number.
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
"""Environment variable: "new" writes the files, "more" marks the numbers that differ from them."""
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
    """A clock with the same seconds in every run: each call is a millisecond or two after the previous one."""

    def __init__(self) -> None:
        self.calls, self.now = 0, 0.0

    def __call__(self) -> float:
        self.calls += 1
        self.now += 1e-3 * (1 + self.calls * 37 % 11 / 10)
        return self.now


def number(x: object) -> str:
    """Formats a number to four digits; a float always has a point or an exponent."""
    if not isinstance(x, float):
        return str(x)
    text = f"{x:.4g}"
    return text if re.search("[.en]", text) else f"{text}.0"


def agree(kept: str, new: str) -> bool:
    """Returns whether two numbers, as text, agree."""
    if kept == new or "~" in (kept, new):
        return True
    if not re.search("[.e]", kept + new):
        return False
    a, b = (float(text.replace(",", "")) for text in (kept, new))
    if abs(a) < ROUNDING and abs(b) < ROUNDING:
        return abs(b) <= SIZE * abs(a) or abs(b) < 1e-12
    return abs(a - b) <= max(CLOSE * abs(a), 1.01 * max(unit(kept), unit(new)))


def unit(text: str) -> float:
    """Returns one unit of the last digit of a number given as text."""
    digits, _, power = text.partition("e")
    return float(10 ** (int(power or 0) - len(digits.partition(".")[2])))


def differences(kept: str, new: str) -> Iterator[str]:
    """Yields the lines that do not agree."""
    for old_line, new_line in zip_longest(kept.splitlines(), new.splitlines(), fillvalue="(nothing)"):
        words = NUMBER.sub("#", old_line) == NUMBER.sub("#", new_line)
        pairs = zip(NUMBER.findall(old_line), NUMBER.findall(new_line), strict=words)
        if not (words and all(agree(*pair) for pair in pairs)):
            yield f"kept  {old_line}\nnow   {new_line}"


def merged(kept: str, new: str) -> str:
    """Returns the kept listing with ~ for numbers that differ in the new one."""
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", new), "\n".join(differences(kept, new))
    numbers = iter(NUMBER.findall(new))

    def one(match: re.Match[str]) -> str:
        return match[0] if agree(match[0], next(numbers)) else "~"

    return NUMBER.sub(one, kept)


def text(value: Any) -> str:
    """Returns a value as Python writes it; for a dataclass, the fields that differ from their defaults."""
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
    """Returns the fields of a dataclass that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(value)}
    return ", ".join(
        f"{name}={text(current)}"
        for name, default in defaults.items()
        if (current := getattr(value, name)) != default and not _repeats(current, default)
    )


def _repeats(value: Any, default: Any) -> bool:
    """Returns whether a value for each layer repeats the default's single value."""
    return isinstance(default, tuple) and len(default) == 1 and {*value} == {*default}


def constants(module: ModuleType) -> str:
    """Lists a module's constants: names in capitals, with their values."""
    body = ast.parse(inspect.getsource(module)).body
    targets = [node.targets for node in body if isinstance(node, ast.Assign)]
    targets += [[node.target] for node in body if isinstance(node, ast.AnnAssign) and node.value]
    names = [
        name.id
        for group in targets
        for node in group
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    ]
    capitals = [name for name in names if name.lstrip("_").isupper()]
    values = {name: text(getattr(module, name)) for name in capitals}
    return "\n".join(f"{name} = {value}" for name, value in values.items() if " at 0x" not in value)


def check(path: Path, listing: str) -> None:
    """Raises AssertionError if a listing does not agree with the file; writes the file if `RENEW` is set."""
    text = "\n".join(line.rstrip() for line in listing.splitlines()) + "\n"
    if how := os.environ.get(RENEW):
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            merged(path.read_text(encoding="utf-8"), text) if how == "more" else text, encoding="utf-8"
        )
    differing = [*differences(path.read_text(encoding="utf-8"), text)]
    assert not differing, f"{path.name}, renewed by `python -m tests.listings`:\n" + "\n".join(differing[:8])


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
