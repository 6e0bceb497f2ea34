"""Completions and chat completions, asked for by OpenAI's own client."""

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.conftest import House, serving, settles

openai = pytest.importorskip("openai")


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    """Clients of a server, which are closed."""
    made: list[Any] = []

    def client(house: House, **more: Any) -> Any:
        made.append(openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, **more))
        return made[-1]

    yield client
    for one in made:
        one.close()


def drawn(number: int) -> dict[str, Any]:
    """A request of many settings."""
    draw = Random(number)
    prompt = "".join(draw.choice("the cat sat ") for _ in range(draw.randint(3, 90)))
    return {
        "prompt": prompt,
        "max_tokens": draw.randint(1, 20),
        "temperature": draw.choice([0, 0.7, 1.3]),
        "top_p": draw.choice([1, 0.9]),
        "seed": number,
        "n": draw.choice([1, 1, 3]),
        "stop": draw.choice([None, ["e"], ["a", "th"], "words that no text has"]),
        "logprobs": draw.choice([None, 0, 2]),
        "logit_bias": draw.choice([{}, {"40": 5.0, "41": -100}]),
        "frequency_penalty": draw.choice([0, 0.5]),
        "presence_penalty": draw.choice([0, -0.3]),
        "extra_body": {"top_k": draw.choice([0, 5])},
    }


def expected(house: House, asked: dict[str, Any]) -> list[Any]:
    """What `LanguageModel.generate` makes of it, alone."""
    lm = next(iter(house.models.places.values())).model.lm
    options = {
        "max_new_tokens": asked["max_tokens"],
        "temperature": asked["temperature"],
        "top_p": asked["top_p"],
        "top_k": asked["extra_body"]["top_k"],
        "seed": asked["seed"],
        "stop": asked["stop"] or (),
        "log_probs": asked["logprobs"] is not None,
        "bias": {int(token): more for token, more in asked["logit_bias"].items()},
        "frequency_penalty": asked["frequency_penalty"],
        "presence_penalty": asked["presence_penalty"],
        "top_log_probs": asked["logprobs"] or 0,
    }
    return lm.generate([asked["prompt"]] * asked["n"], **options)


def test_a_stream_says_the_same_and_its_usage_last(house: House, client: Callable[..., Any]) -> None:
    asked = drawn(4) | {"logprobs": 1}
    chunks = list(
        client(house).completions.create(
            model="small", stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    texts, offsets = [""] * asked["n"], [list[int]() for _ in range(asked["n"])]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [made.text for made in expected(house, asked)]
    whole = client(house).completions.create(model="small", **asked)
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert chunks[-1].choices == []
    assert (
        chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    )


def test_a_conversation(house: House, client: Callable[..., Any]) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]
    answer = client(house).chat.completions.create(
        model="small",
        messages=messages,
        max_completion_tokens=9,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
    )
    lm = house.models.places["small"].model.lm
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert answer.choices[0].message.content == lm.chat(plain, max_new_tokens=9).text
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens == 9
    again = client(house).chat.completions.create(
        model="small", messages=messages, max_completion_tokens=9, temperature=0, stream=True
    )
    said = [choice for chunk in again for choice in chunk.choices]
    assert said[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in said) == answer.choices[0].message.content
    assert [choice.finish_reason for choice in said[:-1]] == [None] * (len(said) - 1)
    assert said[-1].finish_reason == "length"
    assert said[-1].delta.content is None
    assert said[0].delta.content is None


def test_what_others_stored_is_told(house: House, client: Callable[..., Any]) -> None:
    prompt = "a prompt of many words " * 10
    first, second = (
        client(house).completions.create(model="small", prompt=prompt, max_tokens=2, temperature=0)
        for _ in "12"
    )
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 64
    assert first.choices[0].text == second.choices[0].text
    for answer in (first, second):
        timings, usage = answer.timings, answer.usage
        assert timings["cache_n"] + timings["prompt_n"] == usage.prompt_tokens
        assert (timings["predicted_n"], timings["cache_n"]) == (2, usage.prompt_tokens_details.cached_tokens)
        assert 0 < timings["prompt_ms"] < timings["prompt_ms"] + timings["predicted_ms"] < 1e5
        assert timings["predicted_per_second"] == pytest.approx(1e3 / timings["predicted_ms"])


@pytest.mark.parametrize("most", [0, 1, 4])
def test_prompts_are_told_with_their_log_probabilities(
    house: House, client: Callable[..., Any], most: int
) -> None:
    """As lm-evaluation-harness asks: the sum over a continuation is `LanguageModel.score`'s."""
    lm = house.models.places["small"].model.lm
    context, continuation = "the cat sat", " on the mat"
    ids, wanted = lm._pair(0, context, continuation, False)
    asked = {
        "model": "small",
        "prompt": [ids + wanted, ids],
        "max_tokens": most,
        "temperature": 0,
        "echo": True,
    }
    answer = client(house).completions.create(**asked, logprobs=1)
    told = answer.choices[0].logprobs
    scored = lm.score(context, continuation)
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    assert told.token_logprobs[len(ids) : len(told.tokens) - most] == pytest.approx(
        scored.log_probs, abs=2e-5
    )
    greedy = [
        value == max(top.values())
        for value, top in zip(told.token_logprobs[len(ids) :], told.top_logprobs[len(ids) :], strict=True)
    ]
    assert all(greedy[: len(wanted)]) == scored.is_greedy
    assert all(greedy[len(wanted) :])
    assert answer.choices[0].text.startswith("the cat sat on the mat")
    assert answer.choices[1].logprobs.token_logprobs[1 : len(ids)] == pytest.approx(
        told.token_logprobs[1 : len(ids)], abs=2e-5
    )
    chunks = [*client(house).completions.create(**asked, logprobs=1, stream=True)]
    said = [one for chunk in chunks for one in chunk.choices if one.index == 0]
    assert [token for one in said for token in one.logprobs.tokens] == told.tokens
    assert "".join(one.text for one in said) == answer.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(house: House, stream: bool) -> None:
    asked = {"model": "small", "prompt": "go on", "max_tokens": 400, "seed": 3, "stream": stream}
    body, address = json.dumps(asked).encode(), urlsplit(house.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port)) as there:
        there.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        settles(lambda: house.worker.count > 0)
    settles(lambda: not house.used() and not house.worker.count)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"model": "smal"}, 404, "did you mean"),
        ({"max_tokens": 2000}, 400, "trained on 512"),
        ({"prompt": "x " * 900}, 400, "exceeds the available context size (512 tokens)"),
        ({"prompt": [400000]}, 400, "outside the model's vocabulary"),
        ({"n": 0}, 400, "n: "),
        ({"best_of": 3}, 400, "best_of"),
        ({"frequency_penalty": 3}, 400, "frequency_penalty"),
        ({"temperature": 5e-324}, 400, "temperature must be 0 (greedy), or 1e-10 or more"),
        ({"extra_body": {"repetition_penalty": 5e-324}}, 400, "repetition_penalty must be 1e-10 or more"),
        ({"logit_bias": {"3": 1e300}}, 400, "bias: at most 1000000.0 may be added"),
        ({"logit_bias": {"999999": 1}}, 400, "bias: token id 999999 is outside"),
        ({"stream_options": {"include_usage": True}}, 400, "set stream to true"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop": ["a"] * 99}, 400, "stop"),
    ],
)
def test_what_is_wrong_is_said(
    house: House, more: dict[str, Any], status: int, words: str, client: Callable[..., Any]
) -> None:
    with pytest.raises(openai.APIStatusError) as told:
        client(house).completions.create(**{"model": "small", "prompt": "x", "max_tokens": 3, **more})
    assert told.value.status_code == status
    assert words in told.value.body["message"]
    more = {"n_prompt_tokens", "n_ctx"} if "exceeds" in words else set()
    assert told.value.body.keys() == {"message", "type", "param", "code", *more}


def test_unknown_fields_are_told_or_refused(house: House, client: Callable[..., Any]) -> None:
    asked = {"model": "small", "prompt": "x", "max_tokens": 1, "user": "me", "extra_body": {"mirostat": 2}}
    assert client(house).completions.create(**asked).warnings == [
        "mirostat is unknown here and changes nothing"
    ]
    with serving(strict=True) as strict, pytest.raises(openai.BadRequestError, match="mirostat"):
        client(strict).completions.create(**asked)


def test_models_are_found_by_their_names(client: Callable[..., Any]) -> None:
    with serving("one", "two") as house:
        assert [model.id for model in client(house).models.list()] == ["one", "two"]
        assert client(house).models.retrieve("two").id == "two"
        with pytest.raises(openai.NotFoundError, match="no model is named"):
            client(house).completions.create(model=None, prompt="x")


def test_a_stream_lives_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.serve.streams.BEAT", 0.05)
    with serving() as house:
        reader = house.models.places["small"].model.engine.reader  # type: ignore[union-attr]
        read = reader.read

        def slow(*given: Any, **named: Any) -> Any:
            time.sleep(0.4)  # before the first token, and between others
            return read(*given, **named)

        monkeypatch.setattr(reader, "read", slow)
        body = json.dumps({"prompt": "the cat", "max_tokens": 3, "temperature": 0, "stream": True})
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{house.url}/v1/completions", body.encode(), head)
        with urllib.request.urlopen(request) as answer:
            pieces = answer.read().decode().split("\n\n")
    comments = [i for i, piece in enumerate(pieces) if piece == ": still here"]
    told = [i for i, piece in enumerate(pieces) if piece.startswith('data: {"')]
    assert comments[0] < told[0]
    assert any(one < i < other for one, other in pairwise(told) for i in comments)
    assert pieces[-2:] == ["data: [DONE]", ""]
