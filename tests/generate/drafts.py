"""A small model, prompts, and drafts that know the continuation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.generate import Draft, Generation
from headway.generate.constraints import Text
from headway.models import Decoder, build
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


def periodic() -> Decoder:
    """Returns a model without attention: each token decides the next one, so that a text over 8 tokens soon repeats
    itself."""
    model = small()
    with torch.no_grad():
        for block in model.model.blocks:
            block.self_attn.o_proj.weight.zero_()
    return model


def looked_up(ids: list[int], count: int, least: int = 1, most: int = 3) -> list[int]:
    """Returns what followed the last occurrence of the longest suffix of `most` to `least` ids, repeated cyclically."""
    for n in range(most, least - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[len(ids) - n :]:
                return [ids[end + i % (len(ids) - end)] for i in range(count)]
    return []


def essence(generations: Sequence[Generation]) -> list[tuple[list[int], str, str]]:
    return [(generation.ids, generation.text, generation.finish_reason) for generation in generations]
