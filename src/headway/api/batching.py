"""Texts as an encoder reads them: rows of ids, token types and global tokens, in batches.

Legend: B rows, T slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headway.errors import ConfigError
from headway.models import ModelSpec, mark_global
from headway.patterns.program import reads_globals
from headway.text import Encoded
from headway.tokens import Tokens

BATCH = 32


def padded_batches(
    texts: Sequence[Encoded], spec: ModelSpec, *, limit: int, batch_size: int, device: torch.device
) -> Iterator[tuple[list[int], Tensor, dict[str, Any]]]:
    """The texts in batches of like length, padded on the right: their numbers, their ids [B, T], and as keyword
    arguments of `Encoder.forward` their tokens, and types [B, T] where the model has several.

    Where a pattern has global tokens, they are those of the task (`mark_global`). Raises ConfigError for a text of
    more than `limit` tokens, naming it, and for a batch_size below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size must be 1 or more, got {batch_size}")
    for i, text in enumerate(texts):
        if len(text.ids) > limit:
            raise ConfigError(
                f"text {i} has {len(text.ids)} tokens, and this model reads {limit}; give less of it, or cut=True "
                "(--cut) to read its beginning only"
            )
    has_globals = any(map(reads_globals, spec.patterns))
    numbers = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    for at in range(0, len(numbers), batch_size):
        part = [texts[i] for i in numbers[at : at + batch_size]]
        tokens = Tokens.from_lengths([len(text.ids) for text in part])
        if has_globals:
            of_pair = [text.texts for text in part] if spec.head.task == "answer" else None
            tokens = mark_global(tokens, spec.head.task, of_pair)
        more: dict[str, Any] = {"tokens": tokens.to(device)}
        if spec.token_types > 1:
            more["types"] = _padded([text.token_types for text in part]).to(device)
        yield numbers[at : at + batch_size], _padded([text.ids for text in part]).to(device), more


def shortened(text: Encoded, limit: int) -> Encoded:
    """At most `limit` tokens: of the longer text its last token is dropped, until it fits (of two equally long ones,
    the second's). The template stays."""
    slots = [[i for i, which in enumerate(text.texts) if which == t] for t in (0, 1)]
    over = len(text.ids) - limit
    if over > sum(map(len, slots)):
        raise ConfigError(
            f"the template alone has {len(text.ids) - sum(map(len, slots))} tokens, above {limit}"
        )
    gone: set[int] = set()
    for _ in range(over):
        gone.add((slots[0] if len(slots[0]) > len(slots[1]) else slots[1]).pop())
    return select(text, [i for i in range(len(text.ids)) if i not in gone])


def select(text: Encoded, slots: Sequence[int]) -> Encoded:
    """These slots of a text, in this order."""
    return Encoded(
        [text.ids[i] for i in slots],
        [text.token_types[i] for i in slots],
        [text.offsets[i] for i in slots],
        [text.texts[i] for i in slots],
    )


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
