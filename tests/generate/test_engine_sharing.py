"""What requests of an engine share: stored prefixes, and pages that neighbours in the batch have in common."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.cache import PageTable
from headway.errors import ConfigError
from headway.generate import Engine, GenerationConfig, Reader
from headway.generate.requests import Request
from headway.generate.sequences import SampledText
from headway.models import EncoderDecoder, ModelSpec, build
from headway.positions import DynamicNTK, Rotary
from tests.generate.engines import MODELS, drain, ids_of, text_of
from tests.models.test_encoder import seq2seq


@pytest.mark.parametrize("room", [{"budget": 2**24}, {"keep": 2**24}, {}], ids=str)
@pytest.mark.parametrize("name", ["full", "windows", "linear", "hybrid"])
def test_what_an_earlier_request_has_stored_is_found(name: str, room: dict[str, int]) -> None:
    """All full pages of a prompt are found again, for windows and linear attention, too, and the text is the same: for
    requests with prefix_cache, if the reader keeps pages."""
    reader, counts = Reader(MODELS[name], **room), [0]
    engine, read, prompt = Engine(reader, step_tokens=64), reader.read, [7, 8] * 100
    texts = [text_of(0, prompt, GenerationConfig(max_new_tokens=3, prefix_cache=n > 1)) for n in range(3)]

    def counting(chunks: Sequence[tuple[object, Sequence[int]]], *rest: object) -> torch.Tensor:
        counts[-1] += sum(len(ids) for _, ids in chunks)
        return read(chunks, *rest)  # type: ignore[arg-type]

    reader.read = counting  # type: ignore[method-assign, assignment]
    for text in texts:
        counts.append(0)
        deque(engine.run([text]), maxlen=0)
    assert counts[1:] == [202, 202, 202 - (192 if room else 0)]
    assert ids_of(texts[0]) == ids_of(texts[1]) == ids_of(texts[2])


def test_positions_of_a_length_share_nothing() -> None:
    """What such a model stores depends on how the text reached its length."""
    rotary = Rotary(pairing="halves", scaling=DynamicNTK(2.0, trained_context=64))
    model = build(ModelSpec.of_depth(2, 330, positions=rotary), seed=0).eval()
    with pytest.raises(ConfigError, match="budget=9: this model's positions depend on the length"):
        Reader(model, budget=9)
    reader = Reader(model, keep=2**20)
    config = GenerationConfig(max_new_tokens=3, prefix_cache=True, beyond_context=True)
    engine = Engine(reader)
    engine.add(text_of(0, [7] * 200, config))
    engine.step()
    assert len(reader.open([7] * 200)) == 0
    drain(engine)
    assert reader.cache.pool.held == 0


def test_targets_of_other_sources_share_nothing() -> None:
    model = build(seq2seq(), seed=5).eval()
    assert isinstance(model, EncoderDecoder)
    config = GenerationConfig(max_new_tokens=3, prefix_cache=True)
    sources = [[1, 2, 3], [9, 8, 7, 6]]
    texts = [SampledText(Request(n, [4] * 70, config, 3, source=s), None) for n, s in enumerate(sources)]
    engine = Engine(Reader(model, budget=2**24))
    engine.add(texts[0])
    engine.step()
    engine.add(texts[1])
    drain(engine)
    plain = [SampledText(replace(text.request, number=7), None) for text in texts]
    for text in plain:
        deque(Engine(Reader(model)).run([text]), maxlen=0)
    assert [text.ids for text in texts] == [text.ids for text in plain]
    assert len(engine.reader.open([4] * 70)) == 0


def test_texts_that_begin_alike_stand_side_by_side() -> None:
    """Whenever they arrived: the kernels read pages that neighbours have in common only once."""
    reader, steps = Reader(MODELS["full"]), list[list[int]]()
    engine, read = Engine(reader), reader.read

    def watched(chunks: Sequence[tuple[PageTable, Sequence[int]]], *arguments: Any) -> torch.Tensor:
        if all(len(ids) == 1 for _, ids in chunks):
            steps.append([table.ids[0] for table, _ in chunks])
        return read(chunks, *arguments)

    reader.read = watched  # type: ignore[assignment]
    for number in range(6):
        prompt = [number % 2, *range(100), number]
        engine.add(text_of(number, prompt, GenerationConfig(max_new_tokens=4, prefix_cache=True)))
        engine.step()
    drain(engine)
    full = [step for step in steps if len(step) == 3]
    assert full
    assert all(step == sorted(step) or step == sorted(step, reverse=True) for step in full)
