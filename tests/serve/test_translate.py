"""Translators over HTTP: every text is what `Translator.translate` finds, whatever else is requested meanwhile."""

import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from headway.api import Translator
from headway.models import EncoderDecoder, Head, ModelSpec, build
from headway.patterns import Full
from tests.serve.conftest import House, settles
from tests.serve.encoders import serving_encoders
from tests.serve.test_guard import ask
from tests.text.conftest import byte_level

WORDS = "the cat sat on a mat while two dogs ran over green grass".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def translator() -> Translator:
    tokenizer = byte_level()
    size: dict[str, Any] = {"width": 32, "heads": 4, "hidden": 48, "trained_context": 96}
    size |= {"vocab": tokenizer.vocab_size, "layers": 2}
    source = ModelSpec.of("transformer", **size, causal=False, patterns=Full(), head=Head("states"))
    model = build(ModelSpec.of("transformer", **size, encoder=source), seed=2, dtype=torch.float64).eval()
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return Translator(model, tokenizer, generation={"decoder_start_token_id": 0, "eos_token_id": 65})


@pytest.fixture(scope="module")
def house(translator: Translator) -> Iterator[House]:
    with serving_encoders({"ours": translator}) as running:
        yield running


def drawn(number: int) -> dict[str, Any]:
    """Returns a request with many settings."""
    draw = Random(number)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(draw.randint(1, 3))]
    beams = draw.choice([1, 2, 4])
    return {
        "text": draw.choice([texts, texts[0]]),
        "beams": beams,
        "n_best": draw.randint(1, beams),
        "length_penalty": draw.choice([0.0, 1.0, 1.5]),
        "max_tokens": draw.randint(1, 12),
        "prefix": draw.choice(["", "", "two"]),
    }


def test_many_at_once_are_those_of_one_after_the_other(house: House, translator: Translator) -> None:
    requests, responses = [drawn(number) for number in range(16)], dict[int, Any]()

    def ask_one(number: int) -> None:
        responses[number] = ask(house, "/v1/translate", {"model": "ours", **requests[number]})

    threads = [threading.Thread(target=ask_one, args=(number,)) for number in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for number, body in enumerate(requests):
        status, answer = responses[number]
        assert status == 200, answer
        texts = body["text"] if isinstance(body["text"], list) else [body["text"]]
        options = {name: body[name] for name in ("beams", "n_best", "length_penalty", "prefix")}
        translations = translator.translate(texts, max_new_tokens=body["max_tokens"], **options)
        assert [row["text"] for row in answer["data"]] == [row.text for row in translations]
        for row, expected in zip(answer["data"], translations, strict=True):
            assert row["score"] == pytest.approx(expected.score, abs=1e-9)
            assert [hypothesis["text"] for hypothesis in row["hypotheses"]] == [
                expected_hypothesis.text for expected_hypothesis in expected.hypotheses
            ]
            assert row["finish_reason"] == ("length" if expected.finish_reason == "length" else "stop")
        prompt_tokens, new_tokens = (
            sum(translation.prompt_tokens for translation in translations),
            sum(len(translation.ids) for translation in translations),
        )
        assert answer["usage"] == {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
        }
    reader = house.models.places["ours"].model.engine.reader  # type: ignore[attr-defined]
    pools = [cache.pool for cache in (reader.cache, reader.sources.cache)]
    settles(lambda: house.worker.count == 0 and not any(pool.held - pool.idle for pool in pools))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"text": "the cat " * 40}, "more than the 96 of this model's encoder"),
        ({"text": " "}, "empty"),
        ({"beams": 2, "n_best": 3}, "n_best is 3"),
        ({"text": ["a"] * 100, "beams": 6}, "100 texts have 600 beams, more than 512"),
        ({"text": ["a"] * 129}, "text"),
        ({"max_tokens": 99}, "99 more were asked for"),
        ({"length_penalty": 99.0}, "length_penalty"),
    ],
)
def test_what_is_wrong_is_said(house: House, more: dict[str, Any], words: str) -> None:
    status, response = ask(
        house, "/v1/translate", {"model": "ours", "text": "the cat", "max_tokens": 2, **more}
    )
    assert status == 400
    assert words in response["error"]["message"]


def test_no_new_tokens_are_no_text(house: House) -> None:
    status, response = ask(house, "/v1/translate", {"model": "ours", "text": "the cat", "max_tokens": 0})
    assert status == 200
    assert response["data"][0]["text"] == ""
