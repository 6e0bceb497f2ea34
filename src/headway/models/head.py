"""What stands on top of the last layer: what a model is for.

Legend: B rows, T slots, M width, V vocab, C labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.errors import ConfigError, did_you_mean
from headway.nn import ACTIVATIONS

Task = Literal["lm", "masked-lm", "classify", "tag", "answer", "embed", "states"]
Pool = Literal["first", "mean"]

TASKS: dict[str, str] = {
    "lm": "logits of the token that follows, [B, T, V]",
    "masked-lm": "logits of the token that stands there, [B, T, V]",
    "classify": "logits of a row's label, [B, C]",
    "tag": "logits of each token's label, [B, T, C]",
    "answer": "logits of where an answer begins and ends, [B, T, 2]",
    "embed": "one vector for a row, [B, M]",
    "states": "the last layer's states, [B, T, M]",
}


@dataclass(frozen=True)
class Head:
    """What is computed from the last states x [B, T, M].

        lm          x U^T                                           U the output layer, or the embedding when tied
        masked-lm   LayerNorm(act(x W)) U^T                         W [M, M'], M' the width of the embedding
        classify    act(pool(x) W) C^T                              without W where `dense` is None
        tag         x C^T
        answer      x C^T                                           C has two rows
        embed       pool(x), divided by its length where `unit`
        states      x

    In training mode, the spec's dropout falls on what C is given, except in "answer"; with `pooled_dropout` on what W
    of "classify" is given, too. So it does in `transformers`.

    task     one of `TASKS`
    labels   names of the classes of "classify" and "tag"
    pool     "first": the row's first token; "mean": of its tokens (Reimers and Gurevych 2019, section 3)
    dense    activation behind W: "tanh" in BERT's pooler, "gelu" in its masked-lm head; None is no W
    unit     vectors of "embed" have length 1

    Raises ConfigError for a task, pool or activation that is not known, and for labels where none belong.
    """

    task: Task = "lm"
    labels: tuple[str, ...] = ()
    pool: Pool = "first"
    dense: str | None = None
    unit: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(
                f"Head: there is no task {self.task!r}{did_you_mean(str(self.task), TASKS)}; "
                f"there are {', '.join(TASKS)}"
            )
        if self.pool not in ("first", "mean"):
            raise ConfigError(f'Head: pool is "first" or "mean", got {self.pool!r}')
        if self.dense is not None and self.dense != "tanh" and self.dense not in ACTIVATIONS:
            raise ConfigError(
                f"Head: there is no activation {self.dense!r}{did_you_mean(self.dense, [*ACTIVATIONS, 'tanh'])}"
            )
        object.__setattr__(self, "labels", tuple(self.labels))
        if bool(self.labels) != (self.task in ("classify", "tag")):
            what = "needs the names of its labels" if not self.labels else f"has no labels, got {self.labels}"
            raise ConfigError(f"Head: {self.task!r} {what}")
        if self.dense is not None and self.task not in ("masked-lm", "classify", "embed"):
            raise ConfigError(f"Head: {self.task!r} has no dense layer, got dense={self.dense!r}")
        if self.unit and self.task != "embed":
            raise ConfigError(f'Head: unit is for "embed", got it with {self.task!r}')

    @property
    def outputs(self) -> int:
        """C, rows of the last matrix; 0 where there is none of its own."""
        return 2 if self.task == "answer" else len(self.labels)

    @property
    def needs_vocab(self) -> bool:
        """Whether the last matrix is over the vocab."""
        return self.task in ("lm", "masked-lm")
