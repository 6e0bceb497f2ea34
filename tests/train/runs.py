"""A small run of every task, by its name: what laws of runs are asked of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.checkpoints import save_folder
from headway.models import ModelSpec, build
from headway.text import train_bpe
from headway.train import TextConfig
from headway.train.config import TrainConfig
from tests.train import heads, test_chat, test_preference, translation
from tests.train.conftest import ENCODER, documents
from tests.train.reversal import ReversalConfig

Make = Callable[..., TextConfig]
SIZE: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24, "trained_context": 24, "init_std": 0.2,
}  # fmt: skip
HOME_MADE = dict.fromkeys(("vocab", "depth", "width", "heads", "kv_heads", "hidden", "patterns"))
"""Of settings that a model's folder fixes."""


def llama(folder: Path, **changes: Any) -> Path:
    """A small model with the tokenizer of the corpus."""
    tokenizer = train_bpe(documents(0, 60), 300)
    spec = ModelSpec.of("llama", vocab=tokenizer.vocab_size, **{**SIZE, **changes})
    save_folder(folder, build(spec, seed=0).eval(), tokenizer=tokenizer)
    return folder


def beside(settings: Make, folder: Path, **how: Any) -> TextConfig:
    """An adapter beside a frozen model."""
    base = folder / "base"
    model = str(base if base.exists() else llama(base))
    usual = {"model": model, "adapter": "lora", "rank": 4, "lr": 0.02, "warmup": 0.02, "dropout": None}
    return settings(**HOME_MADE | usual | how)


RUNS: dict[str, Callable[..., TrainConfig]] = {
    "causal-lm": lambda settings, folder, **how: settings(**how),
    "masked-lm": lambda settings, folder, **how: settings(**ENCODER | how),
    "chat": lambda settings, folder, **how: test_chat.config(folder, **how),
    "preference": lambda settings, folder, **how: test_preference.config(folder, **how),
    "translation": lambda settings, folder, **how: translation.config(folder, **how),
    "adapter": beside,
    "of one's own": lambda settings, folder, **how: ReversalConfig(out=str(folder / "run"), **how),
    **{
        task: lambda settings, folder, task=task, **how: heads.settings(task, folder, **how)
        for task in heads.DATA
    },
}
