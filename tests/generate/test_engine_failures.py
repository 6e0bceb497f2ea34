"""The engine on failures: only the failing text ends, and the page pool stays consistent."""

from collections import deque
from dataclasses import replace

import pytest
import torch

from headway.cache import PageTable
from headway.generate import Beams, Engine, GenerationConfig, Reader
from headway.generate.requests import Request
from headway.generate.sequences import SampledText
from headway.models import EncoderDecoder, ModelSpec, build
from tests.cache.page_counts import page_counts
from tests.generate.engines import MODELS, alone, drain, ids_of, text_of, used
from tests.models.test_encoder import seq2seq


def test_a_text_whose_logits_are_no_numbers_ends_alone() -> None:
    model = build(ModelSpec.of_depth(2, 330, tied=False), seed=5).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[329] = float("nan")
    config = GenerationConfig(max_new_tokens=6, forbidden=[329])
    texts = [text_of(n, prompt, config) for n, prompt in enumerate([[1, 2, 3], [4, 329], [5] * 70])]
    beams = text_of(3, [7, 329], replace(config, beams=Beams(3)))
    nothing = text_of(4, [6], GenerationConfig(max_new_tokens=6, forbidden=range(330)))
    engine = Engine(Reader(model))
    for text in (*texts, beams, nothing):
        engine.add(text)
    drain(engine)
    errors = [str(text.error) for text in (texts[1], beams, nothing)]
    assert [e.split(":")[0] for e in errors] == [
        "the model's logits for request 1 at step 0 are not numbers (NaN or infinity)",
        "the model's logits for request 3 at step 0 are not numbers (NaN or infinity)",
        "no token is left to choose",
    ]
    assert [text.error for text in texts[::2]] == [None, None]
    assert [ids_of(text) for text in texts[::2]] == [alone(model, text) for text in texts[::2]]
    assert used(engine) == 0


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_a_step_raises_ends_its_requests_and_leaves_the_pool_whole(kind: type[BaseException]) -> None:
    model, config = MODELS["windows"], GenerationConfig(max_new_tokens=6)
    reader = Reader(model, budget=2**20)
    engine = Engine(reader)
    texts = [text_of(n, [n + 1] * (60 + 5 * n), config) for n in range(4)]
    read, calls = reader.read, 0

    def failing(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = read(*arguments)  # type: ignore[arg-type]
        if calls == 4:
            for text in texts[2:]:
                engine.add(text)
            raise kind("memory")
        return logits

    reader.read = failing  # type: ignore[method-assign]
    with pytest.raises(kind, match="memory"):
        deque(engine.run(texts[:2]), maxlen=0)
    expected = "memory" if kind is RuntimeError else "the step was interrupted (KeyboardInterrupt); retry"
    assert [str(text.error) for text in texts] == [expected] * 2 + ["None"] * 2
    drain(engine)
    assert [ids_of(text) for text in texts[2:]] == [alone(model, text) for text in texts[2:]]
    assert used(engine) == 0


def test_what_concerns_no_request_is_raised_and_ends_none() -> None:
    model = MODELS["windows"]
    reader = Reader(model)
    engine, text, whole = Engine(reader), text_of(0, [1, 2], GenerationConfig(max_new_tokens=3)), reader.open

    def failing(*arguments: object) -> PageTable:
        reader.open = whole  # type: ignore[method-assign]
        raise RuntimeError("no table")

    reader.open = failing  # type: ignore[method-assign]
    engine.add(text)
    with pytest.raises(RuntimeError, match="no table"):
        engine.step()
    assert (text.error, engine.is_idle) == (None, False)
    drain(engine)
    assert ids_of(text) == alone(model, text)


def test_a_source_that_cannot_be_read_ends_the_requests_that_come_with_it() -> None:
    model = build(seq2seq(), seed=5).eval()
    assert isinstance(model, EncoderDecoder)
    reader = Reader(model)
    assert reader.sources is not None
    engine, encode, calls = Engine(reader), model.encode, 0
    config = GenerationConfig(max_new_tokens=6)
    texts = [SampledText(Request(n, [1], config, 6, source=[n + 1] * 5), None) for n in range(3)]

    def failing(*arguments: object, **options: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("memory")
        return encode(*arguments, **options)  # type: ignore[arg-type, return-value]

    model.encode = failing  # type: ignore[assignment]
    for text in texts:
        engine.add(text)
        engine.step()
    drain(engine)
    assert [str(text.error) for text in texts] == ["None", "memory", "None"]
    assert [len(text.ids) for text in texts] == [6, 0, 6]
    assert (used(engine), sum(counts["used"] for counts in page_counts(reader.sources.cache.pool))) == (0, 0)
