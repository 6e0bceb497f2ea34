"""Log probabilities of prompt tokens: those of `score`, however the prompt is read. Tolerance: as in test_score."""

from random import Random

import pytest
import torch

from headway.errors import ConfigError
from headway.generate import Engine, GenerationConfig, NgramDraft, Reader, engine, generate, score
from headway.generate.results import ToldToken
from headway.models import Decoder
from headway.patterns import Causal
from tests.generate.conftest import small
from tests.generate.engines import MODELS, text_of
from tests.generate.test_score import CLOSE


def check(model: Decoder, prompt: list[int], entries: tuple[ToldToken, ...], likely: int) -> None:
    """Each token is reported once, with the log probability of `score` and the likeliest tokens of one forward pass."""
    assert [entry.token for entry in entries] == prompt
    assert (entries[0].log_prob, entries[0].top_log_probs) == (None, ())
    if len(prompt) == 1:
        return
    (scored,) = score(model, [(prompt[:1], prompt[1:])])
    assert [entry.log_prob for entry in entries[1:]] == pytest.approx(scored.log_probs, abs=CLOSE)
    with torch.no_grad():
        rows = model(torch.tensor([prompt]))[0, :-1].log_softmax(-1)
    for entry, row in zip(entries[1:], rows, strict=True):
        assert [value for _, value in entry.top_log_probs] == pytest.approx(
            row.topk(likely).values.tolist() if likely else [], abs=CLOSE
        )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("most", [1, 5, 1 << 10])
def test_they_are_those_of_score(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size, beside requests that report nothing, with and without new tokens, and in a second
    reading."""
    monkeypatch.setattr(engine, "MOST_TOLD", most)
    draw, model = Random(most), MODELS[name]
    prompts = [[draw.randrange(330) for _ in range(length)] for length in (1, 2, 9, 40)]
    tells = [{"prompt_log_probs": True, "log_probs": True, "top_log_probs": n} for n in (0, 2, 3, 1)]
    configs = [
        GenerationConfig(max_new_tokens=new, prefix_cache=True, **options)  # type: ignore[arg-type]
        for options, new in zip(tells, (0, 3, 0, 4), strict=True)
    ]
    plain = [GenerationConfig(max_new_tokens=config.max_new_tokens, prefix_cache=True) for config in configs]
    texts = [
        text_of(number, prompt, config)
        for number, (prompt, config) in enumerate(zip(prompts * 3, [*plain, *configs, *configs], strict=True))
    ]
    runs = Engine(Reader(model, keep=1 << 24), step_tokens=16)
    for begin in (0, 4, 8):
        for _ in runs.run(texts[begin : begin + 4]):
            pass
    for i, text in enumerate(texts):
        if i < 4:
            assert not text.deltas[0].prompt  # type: ignore[union-attr]
            continue
        check(model, prompts[i % 4], text.deltas[0].prompt, configs[i % 4].top_log_probs)  # type: ignore[union-attr]
        assert not any(delta.prompt for delta in text.deltas[1:])  # type: ignore[union-attr]
        assert text.ids == texts[i % 4].ids  # type: ignore[union-attr]
    assert runs.reader.cache.pool.held == runs.reader.cache.pool.idle


def test_a_prompt_that_is_sent_back_is_told_once() -> None:
    model = MODELS["full"]
    reader = Reader(model, budget=1)
    reader.cache.pool.budget = 5 * reader.cache.pool.classes[0].nbytes
    config = GenerationConfig(max_new_tokens=0, prompt_log_probs=True, log_probs=True)
    texts = [text_of(n, [*range(n, n + 100)], config) for n in range(2)]
    runs = Engine(reader, step_tokens=30)
    for text in texts:
        runs.add(text)
    for _ in range(5):
        runs.step()
    assert 0 < len(texts[1]._told) < 100  # type: ignore[union-attr]
    runs._preempt()
    while not runs.is_idle:
        runs.step()
    for n, text in enumerate(texts):
        check(model, [*range(n, n + 100)], text.deltas[0].prompt, 0)  # type: ignore[union-attr]


def test_generations_have_them_with_drafts_and_without_a_cache() -> None:
    model = small(Causal())
    for options in ({"draft": NgramDraft(least=1)}, {}):
        config = GenerationConfig(
            max_new_tokens=6, log_probs=True, prompt_log_probs=True, top_log_probs=1, use_cache=bool(options)
        )
        (generation,) = generate(model, [[7, 8, 9, 7, 8]], config, **options)  # type: ignore[arg-type]
        check(model, [7, 8, 9, 7, 8], generation.prompt, 1)
        assert len(generation.ids) == len(generation.log_probs) == 6


def test_they_are_asked_for_with_log_probs() -> None:
    with pytest.raises(ConfigError, match="prompt_log_probs=True needs log_probs=True"):
        GenerationConfig(prompt_log_probs=True)
