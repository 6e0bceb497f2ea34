"""Completions and chat completions, requested by OpenAI's own client."""

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serve.conftest import House, model_of, serving, settles

openai = pytest.importorskip("openai")


@pytest.fixture
def client() -> Iterator[Callable[..., Any]]:
    """Makes clients of a server; they are closed after the test."""
    clients: list[Any] = []

    def client(house: House, **options: Any) -> Any:
        clients.append(openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, **options))
        return clients[-1]

    yield client
    for made_client in clients:
        made_client.close()


def test_a_stream_says_the_same_and_its_usage_last(house: House, client: Callable[..., Any]) -> None:
    sampled = {"temperature": 0.7, "seed": 4, "stop": ["e"]}
    body = {"prompt": "the cat sat", "max_tokens": 20, "n": 3, "logprobs": 1, **sampled}
    chunks = list(
        client(house).completions.create(
            model="small", stream=True, stream_options={"include_usage": True}, **body
        )
    )
    texts, offsets = [""] * 3, [list[int]() for _ in range(3)]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [
        text.text for text in model_of(house).generate(["the cat sat"] * 3, max_new_tokens=20, **sampled)
    ]
    whole = client(house).completions.create(model="small", **body)
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
    chunks = client(house).chat.completions.create(
        model="small", messages=messages, max_completion_tokens=9, temperature=0, stream=True
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == answer.choices[0].message.content
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == "length"
    assert choices[-1].delta.content is None
    assert choices[0].delta.content is None


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
    """lm-evaluation-harness relies on this: the sum over a continuation is that of `LanguageModel.score`."""
    lm = house.models.places["small"].model.lm
    context, continuation = "the cat sat", " on the mat"
    ids, continuation_ids = lm._pair(0, context, continuation, False)
    body = {
        "model": "small",
        "prompt": [ids + continuation_ids, ids],
        "max_tokens": most,
        "temperature": 0,
        "echo": True,
    }
    answer = client(house).completions.create(**body, logprobs=1)
    log_probs = answer.choices[0].logprobs
    scored = lm.score(context, continuation)
    assert log_probs.token_logprobs[0] is log_probs.top_logprobs[0] is None
    assert log_probs.token_logprobs[len(ids) : len(log_probs.tokens) - most] == pytest.approx(
        scored.log_probs, abs=2e-5
    )
    greedy = [
        value == max(top.values())
        for value, top in zip(
            log_probs.token_logprobs[len(ids) :], log_probs.top_logprobs[len(ids) :], strict=True
        )
    ]
    assert all(greedy[: len(continuation_ids)]) == scored.is_greedy
    assert all(greedy[len(continuation_ids) :])
    assert answer.choices[0].text.startswith("the cat sat on the mat")
    assert answer.choices[1].logprobs.token_logprobs[1 : len(ids)] == pytest.approx(
        log_probs.token_logprobs[1 : len(ids)], abs=2e-5
    )
    chunks = [*client(house).completions.create(**body, logprobs=1, stream=True)]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    assert [token for choice in choices for token in choice.logprobs.tokens] == log_probs.tokens
    assert "".join(choice.text for choice in choices) == answer.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(house: House, stream: bool) -> None:
    fields = {"model": "small", "prompt": "go on", "max_tokens": 400, "seed": 3, "stream": stream}
    body, address = json.dumps(fields).encode(), urlsplit(house.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
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
        ({"stream_options": {"include_usage": True}}, 400, "allowed only if stream is true"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop": ["a"] * 99}, 400, "stop"),
    ],
)
def test_what_is_wrong_is_said(
    house: House, more: dict[str, Any], status: int, words: str, client: Callable[..., Any]
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client(house).completions.create(**{"model": "small", "prompt": "x", "max_tokens": 3, **more})
    assert caught.value.status_code == status
    assert words in caught.value.body["message"]
    extra_keys = {"n_prompt_tokens", "n_ctx"} if "exceeds" in words else set()
    assert caught.value.body.keys() == {"message", "type", "param", "code", *extra_keys}


def test_unknown_fields_are_told_or_refused(house: House, client: Callable[..., Any]) -> None:
    body = {"model": "small", "prompt": "x", "max_tokens": 1, "user": "me", "extra_body": {"mirostat": 2}}
    assert client(house).completions.create(**body).warnings == ["mirostat is unknown and was ignored"]
    with serving(strict=True) as strict, pytest.raises(openai.BadRequestError, match="mirostat"):
        client(strict).completions.create(**body)


def test_models_are_found_by_their_names(client: Callable[..., Any]) -> None:
    with serving("one", "two") as house:
        assert [model.id for model in client(house).models.list()] == ["one", "two"]
        assert client(house).models.retrieve("two").id == "two"
        with pytest.raises(openai.NotFoundError, match="model is missing"):
            client(house).completions.create(model=None, prompt="x")


def test_a_stream_lives_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.serve.streams.BEAT", 0.05)
    with serving() as house:
        reader = house.models.places["small"].model.engine.reader  # type: ignore[union-attr]
        read = reader.read

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.4)  # before the first token, and between later ones
            return read(*args, **kwargs)

        monkeypatch.setattr(reader, "read", slow)
        body = json.dumps({"prompt": "the cat", "max_tokens": 3, "temperature": 0, "stream": True})
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{house.url}/v1/completions", body.encode(), head)
        with urllib.request.urlopen(request) as answer:
            pieces = answer.read().decode().split("\n\n")
    comments = [i for i, piece in enumerate(pieces) if piece == ": still here"]
    events = [i for i, piece in enumerate(pieces) if piece.startswith('data: {"')]
    assert comments[0] < events[0]
    assert any(earlier < i < later for earlier, later in pairwise(events) for i in comments)
    assert pieces[-2:] == ["data: [DONE]", ""]
