"""Models with every kind of cache, and random requests for an engine."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch

from headway.attention.delta import DeltaSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.generate import Beams, Engine, GenerationConfig, Sampling, generate
from headway.generate.beams import BeamSearch
from headway.generate.requests import Request
from headway.generate.sequences import SampledText
from headway.models import Decoder, ModelSpec, build
from headway.models.mixers import Softmax
from headway.patterns import Causal, Sink, Window
from tests.cache.page_counts import page_counts
from tests.generate.conftest import MIXED, small

SUMS = ModelSpec.of(
    "llama",
    vocab=330,
    width=32,
    layers=2,
    heads=4,
    hidden=48,
    trained_context=512,
    mixers=LinearAttentionSpec(),
)
HYBRID = replace(
    SUMS,
    mixers=(DeltaSpec(heads=4, key_heads=2, head_dim=8), Softmax()),
    patterns=(Causal(), Window.last(20)),
    kv_heads=2,
)
WINDOWS = (Window.last(70) | (Causal() & Sink(2)), Window.last(20))
MODELS = {
    "mixed": small(MIXED),
    "windows": small(WINDOWS, context=512),
    "full": small(Causal(), context=512),
    "linear": build(SUMS, seed=3).eval(),
    "hybrid": build(HYBRID, seed=3, dtype=torch.float64).eval(),
}


def text_of(number: int, prompt: Sequence[int], config: GenerationConfig) -> SampledText | BeamSearch:
    request = Request(number, list(prompt), config, config.max_new_tokens or 0)
    return SampledText(request, None) if config.beams is None else BeamSearch(request, config.beams)


def ids_of(text: SampledText | BeamSearch) -> list[int]:
    return list(text.ids) if isinstance(text, SampledText) else list(text.best()[0].ids)


def alone(model: Decoder, text: SampledText | BeamSearch) -> list[int]:
    request = text.request
    return generate(model, [request.prompt], request.config, requests=[request.number])[0].ids


def drain(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def used(engine: Engine) -> int:
    return sum(counts["used"] for counts in page_counts(engine.reader.cache.pool))


def drawn(
    draw: Random, number: int, common: list[int], longest: int, most: int, beams: bool
) -> SampledText | BeamSearch:
    """Returns a random request, whose prompt often shares a prefix with others."""
    prompt = common[: draw.choice([0, 64, 70, 130, longest])] + [
        draw.randrange(330) for _ in range(draw.randint(1, 9))
    ]
    search = Beams(draw.randint(2, 3)) if beams and len(prompt) < 10 else None
    drawing = (
        {}
        if search or draw.random() < 0.5
        else {"sampling": Sampling(temperature=1.1, top_k=40), "seed": number}
    )
    config = GenerationConfig(
        max_new_tokens=draw.randint(1, most), beams=search, prefix_cache=True, **drawing
    )
    return text_of(number, prompt, config)
