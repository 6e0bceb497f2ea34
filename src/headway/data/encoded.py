"""Encoded texts as inputs of an encoder (truncated, cut into windows, or packed), and results from its outputs:
labelled spans, and the spans that answer a question.

Legend: B rows, T slots of a row or tokens of a window, N tokens of the context over all windows.
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
    """Returns the keyword arguments of `Encoder.forward` for texts, each in a row padded on the right, or all `packed`
    into one row: ids [B, T], tokens, and types [B, T] if the model has several token types.

    If a pattern uses global tokens, the tokens that the head's task needs are marked global (`mark_global`)."""
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
    """Truncates a text or pair to `limit` tokens: the last token of the longer text is dropped (of two equally long
    ones, the second's) until the pair fits. Tokens of the template are kept.

    Raises ConfigError if the template alone has more than `limit` tokens."""
    slots = [[i for i, side in enumerate(text.texts) if side == t] for t in (0, 1)]
    over = len(text.ids) - limit
    if over > sum(map(len, slots)):
        raise ConfigError(
            f"the tokenizer's template takes {len(text.ids) - sum(map(len, slots))} tokens, above the limit of {limit}"
        )
    dropped: set[int] = set()
    for _ in range(over):
        dropped.add((slots[0] if len(slots[0]) > len(slots[1]) else slots[1]).pop())
    return select(text, [i for i in range(len(text.ids)) if i not in dropped])


def without_places(text: Encoded) -> Encoded:
    """Returns the text without offsets, which take most of its memory."""
    return replace(text, offsets=[])


def select(text: Encoded, slots: Sequence[int]) -> Encoded:
    """Returns the text made of these slots, in this order."""
    return Encoded(**{name: [column[i] for i in slots] for name, column in vars(text).items()})


def pieces(
    text: Encoded, limit: int, *, of: Collection[int] = (0, 1), stride: int | None = None
) -> list[list[int]]:
    """Returns the slots of a text cut into rows of at most `limit`: windows of the tokens of the texts `of`, one every
    `stride` tokens (by default without overlap), each with the tokens before and after the texts `of` around it.

    Raises ConfigError if these leave no room for a window, and for a stride that would skip tokens."""
    chosen = [i for i, side in enumerate(text.texts) if side in of]
    slots = range(len(text.ids))
    if len(slots) <= limit or not chosen:
        return [[*slots]]
    before, after = slots[: chosen[0]], slots[chosen[-1] + 1 :]
    room = limit - len(before) - len(after)
    if room < 1:
        raise ConfigError(
            f"{len(before) + len(after)} tokens (of the template, and of a question) are repeated in every row of "
            f"{limit} tokens, which leaves no room for text; use longer rows"
        )
    stride = room if stride is None else stride
    if stride > room:
        raise ConfigError(
            f"stride {stride} skips tokens between the windows, each of which holds {room} tokens of the context; "
            f"stride must be at most {room}"
        )
    # 10 tokens, room 4, stride 3: windows begin at 0, 3 and 6
    starts = range(0, len(chosen) - room + stride, stride)
    return [[*before, *chosen[at : at + room], *after] for at in starts]


def windows(pair: Encoded, limit: int, stride: int) -> list[Encoded]:
    """Returns windows of a pair's second text (the context), each with the whole first text (the question): see
    `pieces`. Raises DataError if the context has no tokens."""
    if 1 not in pair.texts:
        raise DataError("the context has no tokens: there is nothing to answer from")
    return [select(pair, slots) for slots in pieces(pair, limit, of=(1,), stride=stride)]


@dataclass(frozen=True)
class Span:
    """A labelled span of a text: text[start:end]. `probability`: the mean of its tokens' probabilities."""

    label: str
    text: str
    start: int
    end: int
    probability: float


def spans(text: str, tokens: Iterable[tuple[str, float, tuple[int, int]]]) -> list[Span]:
    """Joins the (label, probability, offsets) of a text's tokens into labelled spans (`headway.metrics.entities`)."""
    labelled = list(tokens)
    joined = []
    for label, first, behind in entities([name for name, _, _ in labelled]):
        start, end = _bare(text, labelled[first][2][0], labelled[behind - 1][2][1])
        mean = sum(p for _, p, _ in labelled[first:behind]) / (behind - first)
        joined.append(Span(label, text[start:end], start, end, mean))
    return joined


@dataclass(frozen=True)
class Answer:
    """context[start:end], and its probability among all spans of the context. "No answer" is the empty text at 0."""

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
    """Returns the `top_k` most probable spans of a context, best first, from the logits [T, 2] of start and end in each
    window; spans have at most `longest` tokens. `no_answer` as in `headway.api.Answerer.answer`."""
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
    """Returns the span without the white space that its first token begins with."""
    return end - len(text[start:end].lstrip()), end


def _stretches(begins: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Returns the scores [T, T] of spans from token i to token j; -inf if j < i or the span is too long."""
    count = len(begins)
    # 3 tokens, longest 2: spans 0-0, 0-1, 1-1, 1-2, 2-2, the diagonal and longest - 1 others above it
    allowed = torch.ones(count, count, dtype=torch.bool, device=begins.device).triu().tril(longest - 1)
    return (begins.unsqueeze(1) + ends.unsqueeze(0)).masked_fill(~allowed, float("-inf"))
