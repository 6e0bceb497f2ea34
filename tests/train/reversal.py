"""A task defined outside the package: a word, followed by the same word backwards."""

from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

import torch

from headway.data import Batch
from headway.data.order import keyed
from headway.models import Decoder, ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.text import train_characters
from headway.train import Evaluation, Task
from headway.train.config import TrainConfig, setting
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.optimizer import Optimizer

HELD_OUT = -1


class ReversalConfig(TrainConfig):
    """Settings of `Reversal`.

    task: this task
    letters: length of a word
    rows: words of a step
    steps: length of the run
    lr: learning rate
    """

    task: str | None = setting(f"{__name__}:Reversal", group="Task")
    letters: int = setting(4, group="Data", ge=1)
    rows: int = setting(12, group="Batch", ge=2)
    steps: int = setting(6, group="Length", ge=1, on_resume="same bits")
    lr: float = setting(3e-3, group="Optimizer", gt=0)


class Reversal(Task[Decoder]):
    """Words are drawn by (seed, step); only the second half of a row is trained."""

    settings = ReversalConfig
    next_command = "headway generate {model} abcd"

    config: ReversalConfig

    def prepare(self, start: Path | None) -> None:
        config = self.config
        self.steps = config.steps
        self.tokenizer = train_characters([ascii_lowercase], 5 + 256 + 26)
        self.letters = torch.tensor(self.tokenizer.encode(ascii_lowercase, bos=False, eos=False))
        size = {
            "width": 16,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "hidden": 24,
            "context": 2 * config.letters + 2,
        }
        spec = ModelSpec.of_depth(1, self.tokenizer.vocab_size, **size)
        model = build(spec, dtype=torch.float32, seed=config.seed)
        assert isinstance(model, Decoder)
        self.model, self.data = model, {"letters": config.letters}

    def optimizer(self, pool: MicrobatchPool) -> Optimizer:
        return Optimizer.single(self.model, torch.optim.Adam(self.model.parameters(), self.config.lr))

    def schedule(self, step: int, seconds: float) -> float:
        return 1.0

    def drawn(self, step: int) -> Batch:
        noise = torch.Generator().manual_seed(keyed(self.config.seed, step) >> 1)
        indices = torch.randint(26, (self.config.rows, self.config.letters), generator=noise)
        words = self.letters[torch.cat([indices, indices.flip(1)], 1)]
        targets = words[:, 1:].clone()
        targets[:, : self.config.letters - 1] = IGNORE_INDEX
        return Batch({"ids": words[:, :-1]}, targets)

    def batches(self, step: int) -> Sequence[Batch]:
        inputs, targets = self.drawn(step)
        return [
            Batch({"ids": ids}, labels)
            for ids, labels in zip(inputs["ids"].chunk(2), targets.chunk(2), strict=True)
        ]

    def evaluate(self, model: Decoder, pool: MicrobatchPool, *, whole: bool) -> Evaluation:
        batch = self.drawn(HELD_OUT)
        with torch.no_grad():
            return Evaluation(float(self.loss(model, batch).loss), self.count(batch))
