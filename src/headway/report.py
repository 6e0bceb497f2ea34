"""Formatting of reports: aligned tables, units, JSON values, and the field descriptions in docstrings.

Imports only the standard library and headway's errors."""

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from typing import Any
from unicodedata import east_asian_width

from headway.errors import ConfigError

_SIZE = re.compile(r"(\d{1,18})\s*(?:([KMGT])(I?))?B?", re.IGNORECASE)


def no_pictures() -> str | None:
    """Returns why plots cannot be drawn here, and the remedy; None if they can."""
    return None if find_spec("matplotlib") else 'matplotlib is not installed; pip install "headway[plots]"'


def plain(value: Any) -> Any:
    """Returns `value` converted to JSON's types; NaN and infinities become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # tensors and numpy values
        return plain(value.tolist())
    return [plain(item) for item in value] if isinstance(value, Iterable) else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Returns rows aligned for a terminal: numbers to the right, words to the left, four significant digits."""
    body = [[cell(item) for item in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in body) for i in range(len(columns))]
    widths = [max([width(columns[i]), *(width(row[i]) for row in body)]) for i in range(len(columns))]

    def line(items: Sequence[str]) -> str:
        cells = (padded(t, w, right=n) for t, w, n in zip(items, widths, numeric, strict=True))
        return indent + "  ".join(cells).rstrip()

    return "\n".join([line(columns), indent + "  ".join("-" * w for w in widths), *map(line, body)])


def width(text: str) -> int:
    """Returns the number of terminal columns of a text: a Chinese character takes two (Unicode, annex 11)."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def padded(text: str, columns: int, *, right: bool = False) -> str:
    """Returns the text padded with spaces to `columns` terminal columns, on its right, or with `right` on its left."""
    spaces = " " * (columns - width(text))
    return spaces + text if right else text + spaces


def cell(value: object) -> str:
    """Returns a value as text: 4 significant digits for floats, thousands of integers separated by a space."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    if isinstance(value, float):
        if value == 0 or not math.isfinite(value):
            return f"{value:g}"
        return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"
    return "" if value is None else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(" ", "") or "0")
    except ValueError:
        return False
    return True


def size(count: float) -> str:
    """Returns a byte count with a unit: 512 B, 1.50 KiB, 3.25 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        text = f"{count:.0f}" if unit == "B" else f"{count:.2f}"
        if abs(float(text)) < 1024:
            return f"{text} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def bytes_of(text: str, what: str) -> int:
    """Returns the bytes of `500MB` (powers of 1000), `24GiB` (of 1024) or a plain number, which must not be 0.

    Raises ConfigError, naming `what`, for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(
            f"{what} {text}: must be a positive number of bytes, or one such as 500MB, 4GB or 24GiB"
        )
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return int(match[1]) * int((1024 if match[3] else 1000) ** power)


def duration(seconds: float) -> str:
    """Returns a duration with at most two units: 35.0 ms, 4.20 s, 12 min 5 s, 3 h 51 min, 2 d 4 h."""
    for unit, size_of in (("s", 1.0), ("ms", 1e-3), ("\u00b5s", 1e-6)):
        if seconds >= size_of and seconds < 59.995:
            return f"{seconds / size_of:.3g} {unit}"
    if seconds < 1e-6:
        return f"{seconds / 1e-9:.3g} ns"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    large = next(i for i, (_, size_of) in enumerate(units) if round(seconds) >= size_of)
    (large_unit, large_size), (small_unit, small_size) = units[large : large + 2]
    whole = round(seconds / small_size)
    return f"{whole * small_size // large_size} {large_unit}" + (
        f" {rest} {small_unit}" if (rest := whole % (large_size // small_size)) else ""
    )


def operations(count: float) -> str:
    """Returns a FLOP count with a prefix: 512 FLOP, 3.25 GFLOP, 2.80 PFLOP."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(count) < 999.5:
            return f"{count:.3g} {prefix}FLOP"
        count /= 1000
    return f"{count:.3g} EFLOP"


def described(value: Any) -> tuple[str, dict[str, str]]:
    """Returns a docstring without its field lines "name: help", and the help of each name.

    Continuation lines of a field are indented."""
    about, *sections = re.split(r"^(\w+): ", inspect.cleandoc(value.__doc__ or ""), flags=re.MULTILINE)
    texts = (" ".join(text.split()) for text in sections[1::2])
    return about.strip(), dict(zip(sections[::2], texts, strict=True))
