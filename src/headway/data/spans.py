"""What an encoder's outputs say of a text: the stretches that it labels, and the one that answers a question.

Legend: T tokens of a window, N tokens of the context over all windows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.metrics import entities
from headway.text import Encoded


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
    found = []
    for label, first, behind in entities([name for name, _, _ in read]):
        start, end = _bare(text, read[first][2][0], read[behind - 1][2][1])
        mean = sum(p for _, p, _ in read[first:behind]) / (behind - first)
        found.append(Span(label, text[start:end], start, end, mean))
    return found


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
    inside = [[i for i, which in enumerate(part.texts) if which == 1] for part in windows]
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
