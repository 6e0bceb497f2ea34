"""A small model, prompts, and drafts that know the continuation."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.generate import Draft, Generation
from headway.generate.constraints import Text
from headway.models import build
from tests.generate.conftest import MIXED, small
from tests.text.conftest import byte_level

MODEL, TOKENIZER = small(MIXED), byte_level()
OTHER = build(MODEL.spec, seed=7).eval()
PROMPTS = [[0, 5, 9], [0, *range(20, 39)], [0, 7, 8, 7, 8, 7, 8]]


@dataclass(frozen=True)
class Scripted(Draft):
    """Proposes the known continuation of request i, truth[i], with a wrong token at every `period`-th position."""

    truth: Sequence[Sequence[int]]
    period: int
    tokens: int = 5

    def propose(self, texts: Sequence[Text], counts: Sequence[int]) -> list[list[int]]:
        return [self._of(text, count) for text, count in zip(texts, counts, strict=True)]

    def _of(self, text: Text, count: int) -> list[int]:
        begin, truth = len(text.ids), self.truth[text.request.number]
        coming = list(truth[begin : begin + count])
        return [
            (token + 1) % 330 if (begin + i + 1) % self.period == 0 else token
            for i, token in enumerate(coming)
        ]


def essence(generations: Sequence[Generation]) -> list[tuple[list[int], str, str]]:
    return [(generation.ids, generation.text, generation.finish_reason) for generation in generations]
