"""The TOML tables of this folder: topics, and their sentences in each language."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from headway.language import Translation


@cache
def read(name: str) -> dict[str, Any]:
    """Returns a table by its name."""
    return tomllib.loads(files("headway_lab.explain").joinpath(f"{name}.toml").read_text(encoding="utf-8"))


@cache
def translation(language: str) -> Translation:
    """Returns the translation of names in the code of topics: words of verdicts, columns, contenders, labels of
    figures."""
    return Translation({} if language == "en" else read(language)["labels"])
