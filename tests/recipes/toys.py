"""Toy data for each shipped recipe of several stages: a function of a folder that gives overrides."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.train.conftest import documents

HAN = "".join(map(chr, range(0x4E00, 0x4E40)))


def text(folder: Path) -> list[str]:
    """One long document."""
    (folder / "text.txt").write_text("".join(documents(0, 400)), encoding="utf-8")
    return [f"data={folder / 'text.txt'}"]


def letters(folder: Path) -> list[str]:
    """The 27 symbols of text8."""
    rng = random.Random(0)
    symbols = "".join(map(chr, range(97, 123))) + " "
    (folder / "text8.txt").write_text(symbols + "".join(rng.choices(symbols, k=30000)), encoding="utf-8")
    return [f"data={folder / 'text8.txt'}"]


def chinese(folder: Path) -> list[str]:
    """Chapters of random characters."""
    rng = random.Random(0)
    lines = [json.dumps({"text": "".join(rng.choices(HAN, k=500))}) + "\n" for _ in range(8)]
    (folder / "chapters.jsonl").write_text("".join(lines), encoding="utf-8")
    return [f"data={folder / 'chapters.jsonl'}"]


TOYS: Mapping[str, Callable[[Path], list[str]]] = {
    "context-extend": text,
    "gqa-uptrain": text,
    "longformer-charlm": letters,
    "roformer-six": chinese,
}
