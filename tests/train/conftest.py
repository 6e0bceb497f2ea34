"""Fixtures: a corpus of documents of different lengths, and the settings of runs that take about a second."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.train import TextConfig

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "while", "for", "if", "else", "return", "def")


def documents(seed: int, count: int, most: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, most))) + "\n" for _ in range(count)]


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips measuring the machine's peak throughput: it takes a second and scales only one number of metrics.jsonl."""
    monkeypatch.setattr("headway.train.tasks.rows.gemm_peak", lambda dtype: 1e12)


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a run's clock advance by 0.01 s whenever it is read, however busy the machine is."""
    clock = SimpleNamespace(monotonic=itertools.count(0, 0.01).__next__)
    for module in ("trainer", "run"):
        monkeypatch.setattr(f"headway.train.{module}.time", clock)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(0, 60)), encoding="utf-8")
    return path


@pytest.fixture
def settings(tmp_path: Path, corpus: Path) -> Callable[..., TextConfig]:
    def make(**changes: Any) -> TextConfig:
        defaults: dict[str, Any] = {
            "data": str(corpus),
            "vocab": 300,
            "depth": 2,
            "width": 16,
            "heads": 2,
            "kv_heads": 1,
            "hidden": 24,
            "patterns": "Window.last(8); Causal()",
            "context": 24,
            "batch_tokens": 24 * 8,
            "micro_batch": 3,
            "steps": 6,
            "warmup": 0.2,
            "dtype": "fp32",
            "out": str(tmp_path / "run"),
        }
        return TextConfig.of(defaults | changes)

    return make


ENCODER: dict[str, Any] = {"family": "bert", "kv_heads": None, "patterns": None, "hidden": 24}


@pytest.fixture
def encoder(settings: Callable[..., TextConfig]) -> Callable[..., TextConfig]:
    def make(**changes: Any) -> TextConfig:
        return settings(**{**ENCODER, **changes})

    return make
