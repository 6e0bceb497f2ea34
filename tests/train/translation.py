"""A small parallel corpus, and the settings of a translation run that takes a second."""

from pathlib import Path
from typing import Any

from headway.train.tasks.translation import TranslationConfig

ENGLISH = ["red", "green", "blue", "cat", "dog", "house"]
GERMAN = ["rot", "grün", "blau", "Katze", "Hund", "Haus"]
TINY: dict[str, Any] = {
    "vocab": 300,
    "layers": 1,
    "width": 32,
    "heads": 2,
    "hidden": 64,
    "context": 32,
    "batch_tokens": 256,
    "steps": 40,
    "warmup": 20,
    "lr_scale": 0.5,
    "dtype": "fp32",
    "dropout": 0.0,
}


def corpus(folder: Path, count: int = 60) -> dict[str, str]:
    """Writes colours and things in English and, word by word, in German; returns the settings that name the files."""
    picks = [[(7 * i + 3 * j) % 6 for j in range(1 + i % 3)] for i in range(count)]
    (folder / "a.en").write_text("".join(" ".join(ENGLISH[k] for k in p) + "\n" for p in picks), "utf-8")
    (folder / "a.de").write_text("".join(" ".join(GERMAN[k] for k in p) + "\n" for p in picks), "utf-8")
    return {"source": str(folder / "a.en"), "target": str(folder / "a.de")}


def config(folder: Path, **changes: Any) -> TranslationConfig:
    """Returns settings with held-out pairs and dropout, in steps of up to 40 pairs, about three steps an epoch."""
    files = corpus(folder)
    held = {f"validation_{side}": path for side, path in files.items()}
    defaults = {"batch_tokens": 128, "micro_batch": 20, "seed": 1, "steps": 10, "dropout": 0.1}
    return TranslationConfig.of({**TINY, **files, **held, **defaults, "out": str(folder / "run"), **changes})
