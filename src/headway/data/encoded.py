"""Texts as an encoder reads them: cut to its context, cut into windows, and in batches of like length.

Legend: B rows, T slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from headway.data.rows import padded
from headway.errors import ConfigError, DataError
from headway.models import ModelSpec, mark_global
from headway.patterns.program import reads_globals
from headway.text import Encoded
from headway.tokens import Tokens


def by_length(texts: Sequence[Encoded], batch_size: int) -> Iterator[list[int]]:
    """The numbers of the texts, each once, `batch_size` at a time; those of like length are together."""
    numbers = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    for at in range(0, len(numbers), batch_size):
        yield numbers[at : at + batch_size]


def encoder_inputs(
    texts: Sequence[Encoded], spec: ModelSpec, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """The keyword arguments of `Encoder.forward` for texts, padded on the right: ids [B, T], tokens, and types [B, T]
    where the model has several.

    Where a pattern has global tokens, they are those of the head's task (`mark_global`)."""
    tokens = Tokens.from_lengths([len(text.ids) for text in texts])
    if any(map(reads_globals, spec.patterns)):
        of_pair = [text.texts for text in texts] if spec.head.task == "answer" else None
        tokens = mark_global(tokens, spec.head.task, of_pair)
    inputs: dict[str, Any] = {
        "ids": padded([text.ids for text in texts]).to(device),
        "tokens": tokens.to(device),
    }
    if spec.token_types > 1:
        inputs["types"] = padded([text.token_types for text in texts]).to(device)
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
    return Encoded(
        [text.ids[i] for i in slots],
        [text.token_types[i] for i in slots],
        [text.offsets[i] for i in slots],
        [text.texts[i] for i in slots],
    )


def pieces(text: Encoded, limit: int) -> list[list[int]]:
    """The slots of a text in rows of at most `limit`, each of its tokens in one, the template's in all. Raises
    ConfigError where the template leaves no room."""
    own = [i for i, which in enumerate(text.texts) if which is not None]
    if not own:
        return [list(range(len(text.ids)))]
    before, after = range(own[0]), range(own[-1] + 1, len(text.ids))
    room = limit - len(before) - len(after)
    if room < 1:
        raise ConfigError(
            f"rows of {limit} tokens have no room for text within the template; use longer ones"
        )
    return [[*before, *own[at : at + room], *after] for at in range(0, len(own), room)]


def windows(pair: Encoded, limit: int, stride: int) -> list[Encoded]:
    """The pair as rows of at most `limit` tokens: the question whole in each, the context from every `stride`-th token
    on until its end is reached."""
    context = [i for i, which in enumerate(pair.texts) if which == 1]
    if not context:
        raise DataError("the context has no tokens: there is nothing to answer from")
    room = limit - (len(pair.ids) - len(context))
    if room >= len(context):
        return [pair]
    if room < 1:
        raise ConfigError(
            f"the question leaves no room for the context: {len(pair.ids) - len(context)} of {limit} tokens"
        )
    if stride > room:
        raise ConfigError(
            f"stride {stride} leaves tokens between the windows unread, which hold {room} of the context; at most "
            f"{room}"
        )
    before, after = list(range(context[0])), list(range(context[-1] + 1, len(pair.ids)))
    starts: Sequence[int] = range(0, len(context) - room + stride, stride)
    return [select(pair, [*before, *context[at : at + room], *after]) for at in starts]
