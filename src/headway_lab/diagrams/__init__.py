"""The figures of the documents, drawn from specs of models and from small runs, with labels in either language.

`headway explain figures --out FOLDER` writes them, and has written those of docs/figures."""

import tomllib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

from headway.errors import ConfigError, did_you_mean
from headway.language import LANGUAGES, check_language
from headway_lab.diagrams.drawing import Drawing
from headway_lab.diagrams.models import Say, blocks, multi_head, shared_heads
from headway_lab.diagrams.runs import decaying, four_patterns, norms, turned_pairs
from headway_lab.diagrams.steps import growing_cache

DIAGRAMS: dict[str, Callable[[Say], Drawing]] = {
    "blocks": blocks,
    "multi-head": multi_head,
    "heads": shared_heads,
    "rotary": turned_pairs,
    "norms": norms,
    "cache": growing_cache,
    "patterns": four_patterns,
    "decay": decaying,
}


@cache
def words() -> dict[str, dict[str, dict[str, str]]]:
    """Returns the labels by diagram, key and language."""
    return tomllib.loads(files(__name__).joinpath("words.toml").read_text(encoding="utf-8"))


def draw(name: str, language: str) -> Drawing:
    """Draws one of `DIAGRAMS`. Raises ConfigError for an unknown name or language."""
    if name not in DIAGRAMS:
        raise ConfigError(
            f"no figure {name!r}{did_you_mean(name, DIAGRAMS)}; figures are {', '.join(DIAGRAMS)}"
        )
    return DIAGRAMS[name](labels(name, language))


def labels(name: str, language: str) -> Say:
    """Returns a function from a key to the label of a diagram in a language. Raises ConfigError for an unknown
    language."""
    check_language(language, "figures")

    def say(key: str, **numbers: object) -> str:
        return words()[name][key][language].format(**numbers)

    return say


def write(folder: Path) -> list[Path]:
    """Writes all figures in all languages as FOLDER/NAME.LANGUAGE.svg, and returns their paths."""
    return [
        write_svg(folder, name, language, draw(name, language)) for name in DIAGRAMS for language in LANGUAGES
    ]


def write_svg(folder: Path, name: str, language: str, drawing: Drawing) -> Path:
    """Writes a figure into a folder, which is created if missing, and returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{language}.svg"
    path.write_text(drawing.to_svg(), encoding="utf-8")
    return path
