"""Each task of the trainer, with a model that two processes share, is trained as by one process."""

from pathlib import Path
from typing import Any

import pytest

from headway.parallel import Mesh
from headway.train import train
from tests.checkpoints.shares import share
from tests.train import heads
from tests.train.runs import RUNS, Make
from tests.train.test_tensor_parallel import assert_close, by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:train_words"),
]  # the corpora have few words
TWO: dict[str, Any] = {
    "kv_heads": 2, "backend": "auto", "dropout": 0.1, "steps": 6, "clip": 0.3, "workers": 1,
}  # fmt: skip
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal-lm": ("causal-lm", {**TWO, "heads": 4}),
    "masked-lm": ("masked-lm", TWO),
    "chat": ("chat", {**TWO, "validation_share": 0.1}),
    "dpo": ("preference", TWO),
    "orpo": ("preference", {**TWO, "loss": "orpo"}),
    "translation": ("translation", {"steps": 6, "eval_every": 9, "clip": 0.3}),
    **{task: (task, {"dropout": 0.1}) for task in heads.DATA},
}


@share("task", TASKS, 0, 3)
def test_row_45_tasks_of_shared_models(task: str, settings: Make, tmp_path: Path) -> None:
    """Losses, norms and held-out losses are equal, with dropout, which both processes draw alike."""
    run, changes = TASKS[task]
    config = RUNS[run](settings, tmp_path, **changes)
    train(config, quiet=True)
    assert_close(by(Mesh(tp=2), config, tmp_path / "shared").out, config.out, after=0)
