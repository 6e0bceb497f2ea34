"""Answers that stand in a text (Devlin et al. 2019, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.api.encoders import TextEncoder
from headway.api.rows import BATCH, chosen
from headway.errors import ConfigError, DataError
from headway.text import Encoded


@dataclass(frozen=True)
class Answer:
    """context[start:end], and how likely it is among all stretches of the context."""

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
        batch_size: int = BATCH,
    ) -> list[Answer]:
        """The `top_k` likeliest answers, the best first, none inside another's place twice.

        A stretch from token i to token j has the probability p(begins at i) p(ends at j), each a softmax over the
        tokens of the context (over those of all windows). A context that is longer than the model reads is cut into
        windows, each `stride` tokens after the one before; a stretch counts where its score is highest.

        longest: tokens of an answer, at most.
        Raises DataError for a context without tokens, ConfigError when the question leaves no room for it.
        """
        for name, value in (("top_k", top_k), ("longest", longest), ("stride", stride)):
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}")
        parts = windows(self._read([(question, context)])[0], self.limit, stride)
        outputs = self._outputs(parts, batch_size)
        inside = [torch.tensor([which == 1 for which in part.texts]) for part in parts]
        begins, ends = (
            torch.cat([out[here, side] for out, here in zip(outputs, (i.to(self.device) for i in inside), strict=True)])
            .double()
            .log_softmax(0)
            for side in (0, 1)
        )  # fmt: skip
        best: dict[tuple[int, int], float] = {}
        first = 0
        for part, here in zip(parts, inside, strict=True):
            places = [part.offsets[i] for i in here.nonzero().flatten().tolist()]
            size = len(places)
            scores = _stretches(begins[first : first + size], ends[first : first + size], longest)
            top = scores.flatten().topk(min(top_k * 4, scores.numel()))
            for value, at in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                start, end = places[at // size], places[at % size]
                if value > float("-inf") and start is not None and end is not None:
                    place = (start[0], end[1])
                    best[place] = max(value, best.get(place, value))
            first += size
        ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:top_k]
        return [
            Answer(context[a:b], a, b, float(torch.tensor(value, dtype=torch.float64).exp()))
            for (a, b), value in ranked
        ]


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
    return [chosen(pair, [*before, *context[at : at + room], *after]) for at in starts]


def _stretches(begins: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Scores [T, T] of stretches from i to j, -inf where j < i or the stretch is too long."""
    count = len(begins)
    allowed = torch.ones(count, count, dtype=torch.bool, device=begins.device).triu().tril(longest - 1)
    return (begins.unsqueeze(1) + ends.unsqueeze(0)).masked_fill(~allowed, float("-inf"))
