"""A small run of each task by name, for the tests of rules that hold for every run."""

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
"""The settings that a model folder fixes, all None."""


def llama(folder: Path, **changes: Any) -> Path:
    """Saves a small model with the corpus's tokenizer and returns its folder."""
    tokenizer = train_bpe(documents(0, 60), 300)
    spec = ModelSpec.of("llama", vocab=tokenizer.vocab_size, **{**SIZE, **changes})
    save_folder(folder, build(spec, seed=0).eval(), tokenizer=tokenizer)
    return folder


def beside(settings: Make, folder: Path, **changes: Any) -> TextConfig:
    """Returns the settings of an adapter run beside the frozen model in `folder`/base."""
    base = folder / "base"
    model = str(base if base.exists() else llama(base))
    defaults = {"model": model, "adapter": "lora", "rank": 4, "lr": 0.02, "warmup": 0.02, "dropout": None}
    return settings(**HOME_MADE | defaults | changes)


RUNS: dict[str, Callable[..., TrainConfig]] = {
    "causal-lm": lambda settings, folder, **changes: settings(**changes),
    "masked-lm": lambda settings, folder, **changes: settings(**ENCODER | changes),
    "chat": lambda settings, folder, **changes: test_chat.config(folder, **changes),
    "preference": lambda settings, folder, **changes: test_preference.config(folder, **changes),
    "translation": lambda settings, folder, **changes: translation.config(folder, **changes),
    "adapter": beside,
    "of one's own": lambda settings, folder, **changes: ReversalConfig(out=str(folder / "run"), **changes),
    **{
        task: lambda settings, folder, task=task, **changes: heads.settings(task, folder, **changes)
        for task in heads.DATA
    },
}
