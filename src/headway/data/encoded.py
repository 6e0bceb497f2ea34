"""Texts as an encoder reads them, cut to its context, cut into windows, and side by side; and results from its outputs:
the stretches that it labels, and the one that answers a question.

Legend: B rows, T slots or tokens of a window, N tokens of the context over all windows.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headway.data.rows import padded
from headway.errors import ConfigError, DataError
from headway.metrics import entities
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
    slots = [[i for i, side in enumerate(text.texts) if side == t] for t in (0, 1)]
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
    """The text without offsets, which take most of its memory."""
    return replace(text, offsets=[])


def select(text: Encoded, slots: Sequence[int]) -> Encoded:
    """These slots of a text, in this order."""
    return Encoded(**{name: [column[i] for i in slots] for name, column in vars(text).items()})


def pieces(
    text: Encoded, limit: int, *, of: Collection[int] = (0, 1), stride: int | None = None
) -> list[list[int]]:
    """The slots of a text in rows of at most `limit`: its tokens of the texts `of` from every `stride`-th one on, until
    their end is reached (by default each in one row), and the tokens before and behind them in every row. Raises
    ConfigError where that leaves no room, and for a stride that leaves tokens out."""
    chosen = [i for i, side in enumerate(text.texts) if side in of]
    every = range(len(text.ids))
    if len(every) <= limit or not chosen:
        return [[*every]]
    before, after = every[: chosen[0]], every[chosen[-1] + 1 :]
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
    # 10 tokens, room 4, stride 3: windows begin at 0, 3 and 6
    starts = range(0, len(chosen) - room + stride, stride)
    return [[*before, *chosen[at : at + room], *after] for at in starts]


def windows(pair: Encoded, limit: int, stride: int) -> list[Encoded]:
    """`pieces` of the second text, the context, with the first, the question, whole in each."""
    if 1 not in pair.texts:
        raise DataError("the context has no tokens: there is nothing to answer from")
    return [select(pair, slots) for slots in pieces(pair, limit, of=(1,), stride=stride)]


@dataclass(frozen=True)
class Span:
    """A stretch of a text with one label: text[start:end]. `probability`: the mean over its tokens."""

    label: str
    text: str
    start: int
    end: int
    probability: float


def spans(text: str, tokens: Iterable[tuple[str, float, tuple[int, int]]]) -> list[Span]:
    """Joins the (label, probability, place) of a text's tokens into stretches (`headway.metrics.entities`)."""
    read = list(tokens)
    stretches = []
    for label, first, behind in entities([name for name, _, _ in read]):
        start, end = _bare(text, read[first][2][0], read[behind - 1][2][1])
        mean = sum(p for _, p, _ in read[first:behind]) / (behind - first)
        stretches.append(Span(label, text[start:end], start, end, mean))
    return stretches


@dataclass(frozen=True)
class Answer:
    """context[start:end], and how likely it is among all stretches of the context. No answer is the empty text at 0."""

    text: str
    start: int
    end: int
    probability: float


def best_answers(
    context: str,
    windows: Sequence[Encoded],
    outputs: Sequence[Tensor],
    *,
    top_k: int = 1,
    longest: int = 30,
    no_answer: float | None = None,
) -> list[Answer]:
    """The likeliest stretches of a context, the best first, by the logits [T, 2] of beginning and end in each window;
    `no_answer` as in `headway.api.Answerer.answer`."""
    inside = [[i for i, side in enumerate(part.texts) if side == 1] for part in windows]
    logits_N2 = torch.cat([out[slots] for out, slots in zip(outputs, inside, strict=True)])
    if no_answer is not None:
        logits_N2 = torch.cat([logits_N2, min((out[:1] for out in outputs), key=lambda x: float(x.sum()))])
    begins, ends = logits_N2.double().log_softmax(0).unbind(1)
    best: dict[tuple[int, int], float] = {}
    first = 0
    for part, slots in zip(windows, inside, strict=True):
        places, size = [part.offsets[i] for i in slots], len(slots)
        scores = _stretches(begins[first : first + size], ends[first : first + size], longest)
        top = scores.flatten().topk(min(top_k * 4, scores.numel()))
        for value, at in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            start, end = places[at // size], places[at % size]
            if value > float("-inf") and start is not None and end is not None:
                place = _bare(context, start[0], end[1])
                best[place] = max(value, best.get(place, value))
        first += size
    ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))
    answers = [Answer(context[a:b], a, b, math.exp(score)) for (a, b), score in ranked]
    if no_answer is not None:
        null = float(begins[-1] + ends[-1])
        before = sum(score > null + no_answer for _, score in ranked)
        answers.insert(before, Answer("", 0, 0, math.exp(null)))
    return answers[:top_k]


def _bare(text: str, start: int, end: int) -> tuple[int, int]:
    """The place without the white space that its first token begins with."""
    return end - len(text[start:end].lstrip()), end


def _stretches(begins: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Scores [T, T] of stretches from i to j, -inf where j < i or the stretch is too long."""
    count = len(begins)
    allowed = torch.ones(count, count, dtype=torch.bool, device=begins.device).triu().tril(longest - 1)
    return (begins.unsqueeze(1) + ends.unsqueeze(0)).masked_fill(~allowed, float("-inf"))
