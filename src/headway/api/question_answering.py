"""Answers inside a text (Devlin et al. 2019, sections 4.2 and 4.3).

Legend: N tokens of the context, over all windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.api.batching import BATCH, select
from headway.api.encoders import TextEncoder
from headway.errors import ConfigError, DataError
from headway.text import Encoded


@dataclass(frozen=True)
class Answer:
    """context[start:end], and how likely it is among all stretches of the context. No answer is the empty text at 0."""

    text: str
    start: int
    end: int
    probability: float


class Answerer(TextEncoder):
    """Finds the answer to a question in a text."""

    heads = ("answer",)

    def answer(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        longest: int = 30,
        stride: int = 128,
        no_answer: float | None = None,
        batch_size: int = BATCH,
    ) -> list[Answer]:
        """The `top_k` likeliest answers, the best first; each stretch of the context at most once.

        A stretch from token i to token j has the probability p(begins at i) p(ends at j), each a softmax over the
        tokens of the context (over those of all windows). A context that is longer than the model reads is cut into
        windows, each `stride` tokens after the one before; a stretch counts where its score is highest.

        With `no_answer` = t, that the context holds none is among the answers. For S and E the logits of beginning and
        end, C the row's first token ([CLS]),

            s_null = S_C + E_C, the least of all windows      s(i, j) = S_i + E_j, i <= j

        and stretches for which s(i, j) > s_null + t rank before it, the others after it (Devlin et al. 2019, section
        4.3, for SQuAD v2.0; the least of the windows as in their code). t is chosen on held-out questions: log
        p(no answer) - log p(the best stretch) is what to compare it with. C then takes part in both softmaxes.

        longest: tokens of an answer, at most.
        Raises DataError for a context without tokens; ConfigError when the question leaves no room for it, for a
        no_answer that is NaN, and for no_answer with a tokenizer that puts no token before the question.
        """
        for name, value in (("top_k", top_k), ("longest", longest), ("stride", stride)):
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}")
        parts = windows(self._read([(question, context)])[0], self.limit, stride)
        if no_answer is not None and math.isnan(no_answer):
            raise ConfigError("no_answer is a difference of scores, got nan; 0 is the one to begin with")
        if no_answer is not None and parts[0].texts[0] is not None:
            raise ConfigError(
                "no_answer is scored at the token before the question ([CLS]), and this tokenizer puts none there; "
                "leave no_answer out"
            )
        outputs = self._outputs(parts, batch_size)
        inside = [[i for i, which in enumerate(part.texts) if which == 1] for part in parts]
        logits_N2 = torch.cat([out[slots] for out, slots in zip(outputs, inside, strict=True)])
        if no_answer is not None:
            logits_N2 = torch.cat(
                [logits_N2, min((out[:1] for out in outputs), key=lambda x: float(x.sum()))]
            )
        begins, ends = logits_N2.double().log_softmax(0).unbind(1)
        best: dict[tuple[int, int], float] = {}
        first = 0
        for part, slots in zip(parts, inside, strict=True):
            places, size = [part.offsets[i] for i in slots], len(slots)
            scores = _stretches(begins[first : first + size], ends[first : first + size], longest)
            top = scores.flatten().topk(min(top_k * 4, scores.numel()))
            for value, at in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                start, end = places[at // size], places[at % size]
                if value > float("-inf") and start is not None and end is not None:
                    place = (start[0], end[1])
                    best[place] = max(value, best.get(place, value))
            first += size
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))
        answers = [Answer(context[a:b], a, b, math.exp(score)) for (a, b), score in ranked]
        if no_answer is not None:
            null = float(begins[-1] + ends[-1])
            before = sum(score > null + no_answer for _, score in ranked)
            answers.insert(before, Answer("", 0, 0, math.exp(null)))
        return answers[:top_k]


def windows(pair: Encoded, limit: int | None, stride: int) -> list[Encoded]:
    """The pair as rows of at most `limit` tokens: the question whole in each, the context from every `stride`-th token
    on until its end is reached."""
    context = [i for i, which in enumerate(pair.texts) if which == 1]
    if not context:
        raise DataError("the context has no tokens: there is nothing to answer from")
    room = len(context) if limit is None else limit - (len(pair.ids) - len(context))
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


def _stretches(begins: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Scores [T, T] of stretches from i to j, -inf where j < i or the stretch is too long."""
    count = len(begins)
    allowed = torch.ones(count, count, dtype=torch.bool, device=begins.device).triu().tril(longest - 1)
    return (begins.unsqueeze(1) + ends.unsqueeze(0)).masked_fill(~allowed, float("-inf"))
