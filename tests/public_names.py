"""docs/api.md: the public names. `python -m tests.public_names` writes it anew."""

import importlib
import inspect
import re
import typing
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MODULES = (
    "headway",
    "headway.patterns",
    "headway.positions",
    "headway.attention",
    "headway.attention.linear_attention",
    "headway.attention.delta",
    "headway.parallel",
    "headway.nn",
    "headway.cache",
    "headway.models",
    "headway.models.cost",
    "headway.checkpoints",
    "headway.text",
    "headway.data",
    "headway.train",
    "headway.generate",
    "headway.surgery",
    "headway.recipes",
    "headway.api",
    "headway.endpoints",
    "headway.instruct",
    "headway.judge",
    "headway.compat",
    "headway.similarity",
    "headway.metrics",
    "headway.errors",
    "headway.classic",
)
INTRODUCTION = """# Public names

What programs may rely on: later versions add to these lists and rename nothing in them. The rest of a module is its own
business. Commands and their options are another surface (`headway --help`), names on disk a third.
"""


def names_of(module: ModuleType) -> list[str]:
    """`__all__`, or the functions and classes that the module defines."""
    given = getattr(module, "__all__", None)
    if given is None:
        own = (n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
        given = [name for name in own if not name.startswith("_")]
    return sorted(given)


def about(value: object) -> str:
    """The first sentence of a class's or function's docstring; nothing for other values."""
    if isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value):
        paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
        return paragraph.partition(". ")[0].rstrip(".:").replace("|", "\\|")
    return "a table" if isinstance(value, typing.Mapping) else ""


def listed() -> dict[str, list[str]]:
    """The names that the page lists, by module."""
    sections = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        module: re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
        for module, rows in zip(sections[::2], sections[1::2], strict=True)
    }


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name in MODULES:
        module = importlib.import_module(name)
        rows = [f"| `{one}` | {about(getattr(module, one))} |" for one in names_of(module)]
        parts.append("\n".join([f"## {name}", "", "| name | what it is |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
