"""Attention as the page asks for it over HTTP: the numbers are those of the Python API."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from headway.api import Cut
from headway.cache import PAGE
from headway.errors import ConfigError
from headway.patterns import Causal, PerHead, Sink, Window, fates, visible
from headway.serve.looks import Looking
from headway.serve.served import Decoding
from headway.serve.visits import Key
from headway.tokens import Tokens
from tests.serve.conftest import House, model_of, serving
from tests.serve.test_guard import ask

TEXT = "the cat sat on the mat, and the cat sat on the hat " * 3
Tell = Callable[..., Any]


@pytest.fixture
def tell(house: House) -> Tell:
    def tell(path: str, **body: Any) -> Any:
        status, response = ask(house, f"/v1/{path}", body={"prompt": TEXT, **body})
        assert status == 200, response
        return response

    return tell


def test_layers_heads_and_tokens_are_counted_from_either_end(house: House, tell: Tell) -> None:
    """The numbers of a row are held against the Python API by test_looks.py."""
    count = len(tell("attention/heads")["ids"])
    first, last = (
        tell("attention", layer=layer, head=head, query=query)
        for layer, head, query in ((1, 2, count - 9), (-1, -2, -9))
    )
    for name in ("query", "weights", "shares", "fates", "largest"):
        assert first[name] == last[name]
    assert first["query"] == count - 9
    assert sum((end - begin) for _, begin, end in first["fates"]) == count


def test_all_heads_of_a_token_and_what_follows_it(house: House, tell: Tell) -> None:
    response, lm = tell("attention/heads", query=20), model_of(house)
    ids = lm.tokenizer.encode(TEXT, eos=False)
    assert response["ids"] == ids
    assert "".join(response["tokens"]) == lm.tokenizer.decode(ids, special=True)
    log_probs = lm.next_log_probs(ids[:21])
    best = log_probs.topk(10)
    assert [candidate["id"] for candidate in response["next"]] == best.indices.tolist()
    assert [candidate["log_prob"] for candidate in response["next"]] == pytest.approx(
        best.values.tolist(), abs=1e-4
    )
    maps = lm.attention(ids)
    for layer, row in enumerate(response["heads"]):
        for shares, head in zip(maps[layer].shares([20]), row, strict=True):
            assert head == pytest.approx({**shares._asdict(), "kind": shares.kind}, abs=1e-5)


@pytest.mark.parametrize(
    "cuts",
    [
        [],
        [{"layer": 1, "head": 2}],
        [{"keys": [3, 9]}, {"layer": 0, "head": 1, "queries": [20, 21], "keys": [4, 5]}],
    ],
)
def test_what_if_is_next_log_probs_with_cuts(house: House, tell: Tell, cuts: list[dict[str, Any]]) -> None:
    response, lm = tell("what-if", query=20, cuts=cuts), model_of(house)
    ids = lm.tokenizer.encode(TEXT, eos=False)[:21]
    parsed_cuts = [
        Cut(**{name: tuple(v) if isinstance(v, list) else v for name, v in cut.items()}) for cut in cuts
    ]
    before, after = lm.next_log_probs(ids), lm.next_log_probs(ids, cuts=parsed_cuts)
    for token in response["tokens"]:
        assert token["before"] == pytest.approx(float(before[token["id"]]), abs=1e-5)
        assert token["after"] == pytest.approx(float(after[token["id"]]), abs=1e-5)
    assert {*before.topk(10).indices.tolist(), *after.topk(10).indices.tolist()} == {
        token["id"] for token in response["tokens"]
    }
    assert response["divergence"] == pytest.approx(float((before.exp() * (before - after)).sum()), abs=1e-4)
    assert (response["divergence"] > 1e-6) == bool(cuts)


def test_a_conversation_is_looked_at_as_its_template_writes_it(house: House, tell: Tell) -> None:
    messages = [{"role": "user", "content": "hello"}]
    response = tell("attention/heads", prompt=None, messages=messages)
    assert response["ids"] == model_of(house).tokenizer.render_chat(messages)


def test_ids_of_an_answer_are_told_so_that_it_can_be_looked_at(house: House) -> None:
    body = {"prompt": TEXT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    _, completion = ask(house, body=body)
    (choice,) = completion["choices"]
    lm = model_of(house)
    generation = lm.generate(TEXT, max_new_tokens=5)
    assert choice["prompt_token_ids"] == lm.tokenizer.encode(TEXT, eos=False)
    assert choice["token_ids"] == list(generation.ids)
    assert "token_ids" not in ask(house, body={**body, "return_token_ids": False})[1]["choices"][0]
    choices = [
        choice
        for chunk in events(house, {**body, "stream": True, "messages": [{"role": "user", "content": "x"}]})
        for choice in chunk["choices"]
    ]
    prompt = lm.tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert [c.get("prompt_token_ids") for c in choices] == [prompt] + [None] * (len(choices) - 1)
    generation = lm.generate(prompt, max_new_tokens=5)
    assert [token for c in choices for token in c["token_ids"]] == list(generation.ids)


def events(house: House, body: dict[str, Any]) -> list[Any]:
    body.pop("prompt")
    request = urllib.request.Request(
        f"{house.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_pages_of_a_text_are_what_the_pool_has(house: House, tell: Tell) -> None:
    text = "pages that were stored by a completion " * 9
    before = tell("attention/heads", prompt=text)
    assert {*before["pages"]["classes"][0]["fates"]} == {"gone"}
    assert ask(house, body={"prompt": text, "max_tokens": 2})[0] == 200
    pages = tell("attention/heads", prompt=text)["pages"]
    assert pages["page"] == PAGE
    assert pages["classes"][0]["fates"] == ["kept"] * (len(before["ids"]) // PAGE)
    assert pages["classes"][0]["layers"] == [0, 1]


def test_pages_of_a_text_are_told_to_the_key_that_stored_it() -> None:
    with serving(keys=[Key("one"), Key("two")]) as house:
        pages = {}
        for key in ("one", "two"):
            if not pages:
                status, _ = ask(
                    house, body={"prompt": 3 * TEXT, "max_tokens": 2}, authorization=f"Bearer {key}"
                )
                assert status == 200
            _, response = ask(
                house, "/v1/attention/heads", {"prompt": 3 * TEXT}, authorization=f"Bearer {key}"
            )
            pages[key] = {*response["pages"]["classes"][0]["fates"]}, response["stored"]
        stored = len(response["ids"]) // PAGE * PAGE
        assert pages == {"one": ({"kept"}, stored), "two": ({"gone"}, 0)}


@pytest.mark.parametrize(
    "pattern",
    [Causal(), Window.last(4), Window.last(3, step=2), Window.last(3) | Causal() & Sink(2), Window.around(2)],
)
def test_released_keys_are_those_that_no_query_sees_from_here_on(pattern: Any) -> None:
    tokens = Tokens.range(20)
    kinds, allowed = fates(pattern, tokens, tokens)[0, 0], visible(pattern, tokens, tokens)[0, 0]
    for t in range(20):
        seen_later = allowed[t:].any(0)
        for j in range(20):
            fate = ("later", "released", "kept", "seen")[int(kinds[t, j])]
            assert (fate == "seen") == bool(allowed[t, j])
            if pattern.is_causal:
                assert (fate == "later") == (j > t)
            if fate == "released":
                assert not seen_later[j]


def test_fates_of_heads_that_differ() -> None:
    tokens, pattern = Tokens.range(9), PerHead(Window.last(2), Window.last(4))
    kinds = fates(pattern, tokens, tokens)[0]
    assert kinds.shape == (2, 9, 9)
    assert kinds[0, 8].tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 3]  # kept for the other head
    assert kinds[1, 8].tolist() == [1, 1, 1, 1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("attention", {"layer": 2, "head": 0}, "layer: 2 is not in"),
        ("attention", {"layer": 0, "head": 4}, "head: 4 is not in"),
        ("attention", {"layer": -3, "head": 0}, "layer: -3 is not in 0..1"),
        ("attention", {"layer": 0, "head": 0, "query": 400}, "query=400 is outside the text"),
        ("attention", {"layer": 0, "head": 0, "prompt": [999999]}, "vocabulary"),
        ("attention/heads", {"prompt": None}, "prompt"),
        ("attention/heads", {"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("what-if", {"cuts": [{"layer": 9}]}, "no layer 9"),
        ("what-if", {"cuts": [{"head": 9}]}, "no head 9"),
        ("what-if", {"cuts": [{"keys": [5, 5]}]}, "first < end"),
        ("what-if", {"cuts": [{"keys": [5, 10**30]}]}, "first < end"),
        ("attention", {"layer": 10**30, "head": 0, "query": 0}, "0 is not in 0..1"),
        ("what-if", {"cuts": [{"keyes": [5, 6]}]}, "keyes"),
        ("what-if", {"cuts": [{}] * 65}, "cuts"),
    ],
)
def test_what_is_wrong_is_said(house: House, path: str, more: dict[str, Any], words: str) -> None:
    status, response = ask(house, f"/v1/{path}", body={"prompt": TEXT, **more})
    assert (status, response["error"]["type"]) == (400, "invalid_request_error")
    assert words in response["error"]["message"]


def test_a_text_that_is_too_long_is_refused_with_both_numbers(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.serve.looks.MOST_BYTES", 10_000)
    looking, model = Looking(), house.models.places["small"].model
    assert isinstance(model, Decoding)
    with pytest.raises(ConfigError, match="at most 11 tokens"):
        looking.at(model, [1] * 12).maps(model, [0])
    maps, _ = looking.at(model, [1] * 11).maps(model, [0])
    assert len(maps[0].keys) == 11


def test_no_more_than_may_wait_are_taken(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.serve.looks.MOST_WAITING", 0)
    status, response = ask(house, "/v1/attention/heads", body={"prompt": TEXT})
    assert (status, response["error"]["type"]) == (429, "rate_limit_error")


def test_looks_change_nothing_of_what_is_written(house: House) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
    first = ask(house, body=body)[1]["choices"]
    assert ask(house, "/v1/what-if", body={"prompt": TEXT, "cuts": [{"layer": 0}]})[0] == 200
    assert ask(house, body=body)[1]["choices"] == first
    assert house.used() == 0
