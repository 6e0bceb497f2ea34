"""The task of a model: the head on its last layer, and which tokens are global for it.

Legend: B rows, T slots, M width, V vocab, C labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from headway.errors import ConfigError, DataError, check_known
from headway.nn import ACTIVATIONS
from headway.tokens import Tokens

Task = Literal["lm", "masked-lm", "classify", "tag", "answer", "embed", "states"]
Pool = Literal["first", "last", "mean"]

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
    """The computation on the last states x [B, T, M].

        lm          x U^T                                           U: output layer, or the embedding if tied; as
                                                                    masked-lm if `dense` is given
        masked-lm   LayerNorm(act(x W)) U^T                         W [M, M'], M' the width of the embedding
        classify    act(pool(x) W) C^T                              without W if `dense` is None
        tag         x C^T
        answer      x C^T                                           C has two rows
        embed       pool(x), normalized to length 1 if `unit`
        states      x

    In training mode the spec's dropout is applied to the input of C, except in "answer"; with `pooled_dropout` also to
    the input of W in "classify", as in `transformers`.

    task     one of `TASKS`
    labels   names of the classes of "classify" and "tag"
    pool     "first", "last": the row's first or last token; "mean": the mean over its tokens (Reimers and Gurevych
             2019, section 3)
    dense    activation after W: "tanh" in BERT's pooler, "gelu" in its masked-lm head; None: no W
    bias     whether W has a bias
    unit     whether the vectors of "embed" are normalized to length 1

    Raises ConfigError for an unknown task, pool or activation, for missing labels or labels of a task that has none,
    and for dense, bias or unit with a task that has no use for them.
    """

    task: Task = "lm"
    labels: tuple[str, ...] = ()
    pool: Pool = "first"
    dense: str | None = None
    bias: bool = True
    unit: bool = False

    def __post_init__(self) -> None:
        check_known(self.task, TASKS, "Head: there is no task")
        check_known(self.pool, get_args(Pool), "Head: there is no pool")
        if self.dense is not None:
            check_known(self.dense, [*ACTIVATIONS, "tanh"], "Head: there is no activation")
        object.__setattr__(self, "labels", tuple(self.labels))
        if bool(self.labels) != (self.task in ("classify", "tag")):
            what = (
                "needs the names of its labels" if not self.labels else f"takes no labels, got {self.labels}"
            )
            raise ConfigError(f"Head: {self.task!r} {what}")
        if self.dense is not None and self.task not in ("lm", "masked-lm", "classify", "embed"):
            raise ConfigError(f"Head: {self.task!r} takes no dense layer, got dense={self.dense!r}")
        if not self.bias and self.dense is None:
            raise ConfigError("Head: bias=False is for a dense layer, but dense=None; leave bias out")
        if self.unit and self.task != "embed":
            raise ConfigError(f'Head: unit=True is for task "embed", got {self.task!r}')

    @property
    def outputs(self) -> int:
        """C, the number of rows of the last matrix; 0 if the head has no matrix of its own."""
        return 2 if self.task == "answer" else len(self.labels)

    @property
    def needs_vocab(self) -> bool:
        """Whether the last matrix is over the vocab."""
        return self.task in ("lm", "masked-lm")

    def inputs(self, width: int, columns: int) -> int:
        """Returns the columns of the last matrix in a model of that width: those of the embedding if a dense layer
        precedes an output layer over the vocab."""
        return columns if self.needs_vocab and self.dense is not None else width


def mark_global(tokens: Tokens, task: Task, texts: Sequence[Sequence[int | None]] | None = None) -> Tokens:
    """Returns the tokens with those marked global that the task needs (Beltagy et al. 2020, section 3.1, "Global
    Attention").

        classify, embed           the first token of the sequence ([CLS], <s>), whose state is pooled
        answer                    the question: every token up to the last one of the first text, including [CLS]
        tag, masked-lm, states    none

    For `answer` these are the tokens that `LongformerForQuestionAnswering` of transformers marks without a given mask
    (there: all before the first </s>). Existing marks are kept. For other choices (beginnings of paragraphs,
    candidates) use `Tokens.with_global`.

    Args:
        tokens: [B|1, T]; padding may be on either side. One row may hold packed documents, each a sequence.
        texts: for "answer", for each row or document: the number of the text that each token belongs to, 0 or 1, or
            None for tokens of the template; this is `texts` of the result of `Tokenizer.inputs`. The first entry
            belongs to token 0, wherever padding is.
    Raises:
        DataError: a task that no encoder has ("lm"); texts for a task that does not use them, or no texts for
            "answer"; texts with another number of rows or tokens, or without a question.
    """
    known = [name for name in TASKS if name != "lm"]
    check_known(task, known, "mark_global: an encoder has no task", error=DataError)
    if (texts is not None) != (task == "answer"):
        why = (
            "needs texts=, the text that each token belongs to (0: question, 1: text)"
            if texts is None
            else "takes no texts; drop texts="
        )
        raise DataError(f"mark_global: {task!r} {why}")
    if texts is not None:
        last = _questions(tokens, texts)
    elif task in ("classify", "embed"):
        last = torch.zeros(1, 1, dtype=torch.int64, device=tokens.device)
    else:
        return tokens
    chosen = tokens.valid & (tokens.index <= last)
    return tokens.with_global(chosen | tokens.globals)


def _questions(tokens: Tokens, texts: Sequence[Sequence[int | None]]) -> Tensor:
    """Returns the index of the last question token: for each slot [B|1, T] if documents are packed, else for each
    row [B, 1]."""
    if tokens.document is not None:
        rows = tokens.document[tokens.valid].unique_consecutive(return_counts=True)[1].tolist()
    else:
        rows = tokens.expand(tokens.rows).valid.sum(1).tolist()
        rows = rows * len(texts) if tokens.rows == 1 else rows
    if len(texts) != len(rows):
        raise DataError(f"mark_global: texts has {len(texts)} rows, but tokens have {len(rows)}")
    last = []
    for row, (text_ids, count) in enumerate(zip(texts, rows, strict=True)):
        if len(text_ids) != count:
            raise DataError(f"mark_global: row {row} has {count} tokens, but texts has {len(text_ids)}")
        if 0 not in text_ids or 1 not in text_ids:
            raise DataError(
                f"mark_global: row {row} is not a pair of question and text; encode it as a pair, the question first"
            )
        last.append(max(i for i, text in enumerate(text_ids) if text == 0))
    last_index = torch.tensor(last, device=tokens.device)
    if tokens.document is None:
        return last_index.unsqueeze(1)
    of_slots = torch.zeros_like(tokens.index)
    of_slots[tokens.valid] = last_index.repeat_interleave(torch.tensor(rows, device=tokens.device))
    return of_slots
