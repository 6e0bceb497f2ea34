"""What reports of recipes say in each language."""

import tomllib
from functools import cache
from importlib.resources import files

from headway.language import Translation


@cache
def translation(language: str) -> Translation:
    """Of verdicts, heads, labels, and of what the shipped recipes claim. Anyone's claims are looked up in its `table`:
    they might look like one of its templates."""
    if language == "en":
        return Translation({})
    text = files("headway.recipes").joinpath(f"{language}.toml").read_text(encoding="utf-8")
    return Translation(tomllib.loads(text))
