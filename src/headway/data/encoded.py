"""Texts as an encoder reads them: cut to its context, cut into windows, and side by side.

Legend: B rows, T slots.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headway.data.rows import padded
from headway.errors import ConfigError, DataError
from headway.models import ModelSpec, mark_global
from headway.patterns.program import reads_globals
from headway.text import Encoded
from headway.tokens import Tokens


def encoder_inputs(
    texts: Sequence[Encoded], spec: ModelSpec, device: torch.device | str = "cpu", *, packed: bool = False
) -> dict[str, Any]:
    """The keyword arguments of `Encoder.forward` for texts, each a row that is padded on the right, or `packed` side by
    side into one row: ids [B, T], tokens, and types [B, T] where the model has several.

    Where a pattern has global tokens, they are those of the head's task (`mark_global`)."""
    lengths = [len(text.ids) for text in texts]
    tokens = Tokens.packed(lengths) if packed else Tokens.from_lengths(lengths)
    if any(map(reads_globals, spec.patterns)):
        of_pair = [text.texts for text in texts] if spec.head.task == "answer" else None
        tokens = mark_global(tokens, spec.head.task, of_pair)

    def rows(lists: list[list[int]]) -> Tensor:
        return padded([[*chain(*lists)]] if packed else lists).to(device)

    inputs: dict[str, Any] = {"ids": rows([text.ids for text in texts]), "tokens": tokens.to(device)}
    if spec.token_types > 1:
        inputs["types"] = rows([text.token_types for text in texts])
    return inputs


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


def without_places(text: Encoded) -> Encoded:
    """The same without offsets, which take most of its memory."""
    return replace(text, offsets=[])


def select(text: Encoded, slots: Sequence[int]) -> Encoded:
    """These slots of a text, in this order."""
    return Encoded(**{name: [column[i] for i in slots] for name, column in vars(text).items()})


def pieces(
    text: Encoded, limit: int, *, of: Collection[int] = (0, 1), stride: int | None = None
) -> list[list[int]]:
    """The slots of a text in rows of at most `limit`: its tokens of the texts `of` from every `stride`-th one on, until
    their end is reached (by default each in one row), and what stands before and behind them in every row. Raises
    ConfigError where that leaves no room, and for a stride that leaves tokens out."""
    own = [i for i, which in enumerate(text.texts) if which in of]
    every = range(len(text.ids))
    if len(every) <= limit or not own:
        return [[*every]]
    before, after = every[: own[0]], every[own[-1] + 1 :]
    room = limit - len(before) - len(after)
    if room < 1:
        raise ConfigError(
            f"{len(before) + len(after)} tokens stand in every row of {limit} (those of the template, and of a "
            "question), which leaves no room for text; use longer rows"
        )
    stride = room if stride is None else stride
    if stride > room:
        raise ConfigError(
            f"stride {stride} leaves tokens between the windows unread, which hold {room} of the context; at most "
            f"{room}"
        )
    starts = range(0, len(own) - room + stride, stride)
    return [[*before, *own[at : at + room], *after] for at in starts]


def windows(pair: Encoded, limit: int, stride: int) -> list[Encoded]:
    """`pieces` of the second text, the context, with the first, the question, whole in each."""
    if 1 not in pair.texts:
        raise DataError("the context has no tokens: there is nothing to answer from")
    return [select(pair, slots) for slots in pieces(pair, limit, of=(1,), stride=stride)]
