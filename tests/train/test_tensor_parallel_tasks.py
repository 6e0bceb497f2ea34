"""Every task of the trainer, its model shared by two processes, is trained as in one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.parallel import Mesh
from headway.train import TextConfig, train
from headway.train.config import TrainConfig
from tests.checkpoints.shares import share
from tests.train import heads, test_chat, test_preference
from tests.train.conftest import ENCODER
from tests.train.test_processes import pairs
from tests.train.test_tensor_parallel import assert_close, by

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:train_words")]  # of so few words
Make = Callable[..., TextConfig]
TWO: dict[str, Any] = {
    "kv_heads": 2,
    "backend": "auto",
    "dropout": 0.1,
    "steps": 6,
    "clip": 0.3,
    "workers": 1,
}
TASKS: dict[str, Callable[[Make, Path], TrainConfig]] = {
    "causal-lm": lambda settings, folder: settings(**TWO, heads=4),
    "masked-lm": lambda settings, folder: settings(**{**TWO, **ENCODER}),
    "chat": lambda settings, folder: test_chat.config(folder, **TWO, validation_share=0.1),
    "dpo": lambda settings, folder: test_preference.config(folder, **TWO),
    "orpo": lambda settings, folder: test_preference.config(folder, **TWO, loss="orpo"),
    "translate": lambda settings, folder: pairs(folder).model_copy(
        update={"steps": 6, "out": str(folder / "one")}
    ),
    **{
        task: lambda settings, folder, task=task: heads.settings(task, folder, dropout=0.1)  # type: ignore[misc]
        for task in heads.DATA
    },
}


@share("task", TASKS, 0, 3)
def test_row_45_tasks_of_shared_models(task: str, settings: Make, tmp_path: Path) -> None:
    """Losses, norms and held-out losses, with dropout, which is drawn alike by both."""
    config = TASKS[task](settings, tmp_path)
    train(config, quiet=True)
    assert_close(by(Mesh(tp=2), config, tmp_path / "shared").out, config.out, after=0)
