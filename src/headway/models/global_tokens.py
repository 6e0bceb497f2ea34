"""Which tokens are global, by what a model is for. (Beltagy et al. 2020, section 3.1, "Global Attention".)

Legend: B rows, T slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.errors import DataError, did_you_mean
from headway.models.head import TASKS, Task
from headway.tokens import Tokens


def mark_global(tokens: Tokens, task: Task, texts: Sequence[Sequence[int | None]] | None = None) -> Tokens:
    """The tokens with those marked global that the task asks for.

        classify, embed           the row's first token ([CLS], <s>), which is what is pooled
        answer                    the question: all up to the last token of the first text, [CLS] with it
        tag, masked-lm, states    none

    Those of `answer` are the tokens that `LongformerForQuestionAnswering` of transformers marks when it is given no
    mask (there: all before the first </s>). Marks that the tokens have already are kept. For other choices
    (the beginnings of paragraphs, candidates) there is `Tokens.with_global`.

    Args:
        tokens: [B|1, T]; padding may stand on either side.
        texts: for "answer", row by row: the text that each token is of, 0 or 1, None for what the template puts
            between; `texts` of what `Tokenizer.inputs` gives. The first entry is of token 0, wherever padding
            stands.
    Raises:
        DataError: a task that no encoder has ("lm"), packed documents, texts where the task looks at none, or none
            where it does; texts of another number of rows or tokens, or without a question.
    """
    if task not in TASKS or task == "lm":
        known = [name for name in TASKS if name != "lm"]
        raise DataError(
            f"mark_global: {task!r} is no task of an encoder{did_you_mean(str(task), known)}; there are "
            f"{', '.join(known)}"
        )
    if tokens.document is not None:
        raise DataError("mark_global: a packed row holds several texts; give one row per text")
    if (texts is not None) != (task == "answer"):
        why = (
            "needs texts=, which token is of the question"
            if texts is None
            else "looks at no texts; drop texts="
        )
        raise DataError(f"mark_global: {task!r} {why}")
    if texts is not None:
        last = torch.tensor(_questions(tokens, texts), device=tokens.device).unsqueeze(1)
    elif task in ("classify", "embed"):
        last = torch.zeros(1, 1, dtype=torch.int64, device=tokens.device)
    else:
        return tokens
    chosen = tokens.valid & (tokens.index <= last)
    return tokens.with_global(chosen | tokens.globals)


def _questions(tokens: Tokens, texts: Sequence[Sequence[int | None]]) -> list[int]:
    """The index of the last token of each row's question."""
    rows = tokens.expand(tokens.rows).valid.sum(1).tolist()
    if tokens.rows == 1:
        rows = rows * len(texts)
    if len(texts) != len(rows):
        raise DataError(f"mark_global: texts of {len(texts)} rows for tokens of {len(rows)}")
    last = []
    for row, (own, count) in enumerate(zip(texts, rows, strict=True)):
        if len(own) != count:
            raise DataError(f"mark_global: row {row} has {count} tokens, but texts says {len(own)}")
        if 0 not in own or 1 not in own:
            raise DataError(
                f"mark_global: row {row} is not a question and a text: encode them as a pair, the question first"
            )
        last.append(max(i for i, text in enumerate(own) if text == 0))
    return last
