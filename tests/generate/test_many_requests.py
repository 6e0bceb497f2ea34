"""Ten thousand requests for each kind of model, in random schedules: each equals its result alone."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from headway.generate import Beams, Engine, GenerationConfig, NgramDraft, Reader, Sampling
from headway.generate.beams import BeamSearch
from headway.generate.requests import Request
from headway.generate.sequences import SampledText
from headway.models import Decoder, EncoderDecoder, build
from headway.nn.adapters import adapter_names
from headway.patterns import Causal, Sink, Window
from tests.generate.bits import Bits
from tests.generate.conftest import small
from tests.generate.engines import MODELS, ids_of, used
from tests.generate.test_adapters import with_adapters
from tests.models.test_encoder import seq2seq

KINDS: dict[str, Callable[[], Decoder | EncoderDecoder]] = {
    "full": lambda: with_adapters(MODELS["full"]),
    "window": lambda: with_adapters(small(Window.last(70), context=512)),
    "sinks": lambda: small((Window.last(30) | (Causal() & Sink(2)), Causal()), context=512),
    "dilated": lambda: small((Window.last(20, step=3), Window.last(70)), context=512),
    "linear": lambda: with_adapters(MODELS["linear"]),
    "encoder-decoder": lambda: build(seq2seq(), seed=5).eval(),  # type: ignore[return-value]
}
DISTINCT = 300
"""Number of different requests; each is asked for many times, in different batches."""


class House(NamedTuple):
    """The settings of an engine: pages of every class (None: no limit), dtype of the cache, drafts and tokens of a
    step; with `bits` the logits are exact and watched."""

    pages: int | None
    kv_dtype: torch.dtype | None = None
    draft: NgramDraft | None = None
    step_tokens: int = 50
    beside: int | None = None
    bits: Bits | None = None


HOUSES = {
    "much room": House(None, step_tokens=300),
    "little room": House(8),
    "int8": House(12, torch.int8, beside=7),
    "drafts": House(5, draft=NgramDraft(tokens=3, least=1)),
}


def request(model: Decoder | EncoderDecoder, draw: Random, number: int, common: list[int]) -> Request:
    """Returns a random request; prompts often share a prefix, and those of an encoder-decoder are short."""
    sampled = draw.random() < 0.5
    has_source, named = isinstance(model, EncoderDecoder), adapter_names(model)
    new = [draw.randrange(model.spec.vocab) for _ in range(draw.randint(1, 9))]
    prompt = (common[:2] if has_source else common[: draw.choice([0, 0, 64, 70, 130, len(common)])]) + new
    config = GenerationConfig(
        max_new_tokens=draw.randint(1, 20),
        prefix_cache=draw.random() < 0.8,
        sampling=Sampling(temperature=1.1, top_k=40) if sampled else Sampling(),
        seed=number,
        eos=[draw.randrange(model.spec.vocab) for _ in range(3)],
        no_repeat_ngram=draw.choice([None, None, 2]),
        adapters=draw.choice([None, None, *([name] for name in named), [], named]) if named else None,
    )
    if not sampled and len(prompt) < 12 and draw.random() < 0.3:
        config = replace(config, beams=Beams(draw.randint(2, 3)), seed=0)
    source = [draw.randrange(model.spec.vocab) for _ in range(draw.randint(1, 12))] if has_source else None
    return Request(number, prompt, config, config.max_new_tokens or 0, source)


def text(request: Request) -> SampledText | BeamSearch:
    beams = request.config.beams
    return SampledText(request, None) if beams is None else BeamSearch(request, beams)


def reader_of(model: Decoder | EncoderDecoder, house: House, **room: Any) -> Reader:
    reader = Reader(model, kv_dtype=house.kv_dtype, exact=house.bits is not None, **room)
    return reader if house.bits is None else house.bits.watch(reader)


def engine_of(model: Decoder | EncoderDecoder, house: House) -> Engine:
    slack = 3 if house.draft else 0
    budget = None if house.pages is None else 1
    reader = reader_of(model, house, slack=slack, budget=budget)
    pool = reader.cache.pool
    if house.pages is not None:
        pool.budget = house.pages * sum(kind.nbytes for kind in pool.classes)
    return Engine(reader, step_tokens=house.step_tokens, beside=house.beside, draft=house.draft)


def alone(model: Decoder | EncoderDecoder, request: Request, house: House) -> list[int]:
    engine, only = Engine(reader_of(model, house)), text(request)
    engine.add(only)
    while not engine.is_idle:
        engine.step()
    return ids_of(only)


def try_house(
    model: Decoder | EncoderDecoder, requests: list[Request], house: House, count: int, draw: Random
) -> None:
    """Asks `count` times for one of the requests, up to 16 at a time, and compares each with its result alone."""
    engine, expected = engine_of(model, house), dict[int, list[int]]()
    live: dict[int, SampledText | BeamSearch] = {}
    asked = checked = 0
    while asked < count or live:
        for _ in range(draw.randint(0, 4)):
            number = draw.randrange(len(requests))
            if asked < count and len(live) < 16 and number not in live:
                live[number], asked = text(requests[number]), asked + 1
                engine.add(live[number])
        if live and draw.random() < 0.02:
            engine.cancel(live.pop(draw.choice([*live])))
        engine.step()
        for number in [number for number, live_text in live.items() if live_text.ended]:
            ended = live.pop(number)
            if number not in expected:
                expected[number] = alone(model, requests[number], house)
            assert ended.error is None
            assert ids_of(ended) == expected[number], requests[number]
            checked += 1
    assert used(engine) == 0
    assert checked > 0.8 * count


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_requests_are_what_each_is_alone(kind: str) -> None:
    model, draw = KINDS[kind](), Random(7)
    common = [draw.randrange(model.spec.vocab) for _ in range(130)]
    requests = [request(model, draw, number, common) for number in range(DISTINCT)]
    refused = {"linear": ("int8", "drafts"), "encoder-decoder": ("drafts",)}.get(kind, ())
    houses = {name: house for name, house in HOUSES.items() if name not in refused}
    for house in houses.values():
        allowed = [each for each in requests if house.draft is None or each.config.beams is None]
        try_house(model, allowed, house, 10_000 // len(houses), draw)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_exact_logits_of_requests_are_the_same_bits_as_alone(kind: str) -> None:
    model, draw = deepcopy(KINDS[kind]()).to(torch.bfloat16), Random(8)
    common = [draw.randrange(model.spec.vocab) for _ in range(130)]
    requests = [request(model, draw, number, common) for number in range(DISTINCT)]
    houses = [House(8, bits=(bits := Bits()))]
    if kind not in ("linear", "encoder-decoder"):
        houses.append(House(5, draft=NgramDraft(tokens=3, least=1), bits=bits))
    for house in houses:
        allowed = [each for each in requests if house.draft is None or each.config.beams is None]
        try_house(model, allowed, house, 10_000 // len(houses), draw)
    assert not bits.differed
    assert bits.agreed > 10_000
