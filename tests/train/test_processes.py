"""Several processes that share the micro batches of each step train as one does, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.train import TextConfig, train
from headway.train.config import TrainConfig
from headway.train.tasks.translation import TranslationConfig
from tests.train.processes import together
from tests.train.test_chat import config as chat_config
from tests.train.test_resume import assert_same_bits
from tests.train.test_translation import TINY, corpus

Make = Callable[..., TextConfig]


def as_one(config: TrainConfig, folder: Path, ranks: int = 2) -> None:
    """The run of these settings in one process and in several: weights, moments and every line of the log."""
    alone, shared = (config.model_copy(update={"out": str(folder / name)}) for name in ("alone", "shared"))
    train(alone, quiet=True)
    together(ranks, lambda rank: train(shared), folder / "said")
    assert_same_bits(shared.out, alone.out)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "dropout": 0.1}], ids=["adamw", "muon-dropout"])
def test_row_45_next_tokens(settings: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    as_one(settings(micro_batch=4, steps=20, clip=0.5, validation_share=0.1, eval_every=9, **changes), tmp_path)
