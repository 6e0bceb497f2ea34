"""llama.cpp's completions, tokenization in both directions, infill, and what the server says of itself."""

import json
from typing import Any

import pytest

from headway.api import LanguageModel
from headway.patterns import Causal
from headway.text import infill, train_bpe
from tests.generate.conftest import small
from tests.serve import conftest
from tests.serve.conftest import House, answer, model_of, serving
from tests.serve.test_guard import ask
from tests.text.conftest import CORPUS


def lines(house: House, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream."""
    text = answer(house, path, {**body, "stream": True})[2].decode()
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")
    ]


USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's default settings."""


def test_a_completion_is_that_of_the_python_api(house: House) -> None:
    body = {"prompt": "the cat", "n_predict": 9, "seed": 4, "n_probs": 3, "return_tokens": True}
    generation = model_of(house).generate(
        "the cat", max_new_tokens=9, seed=4, log_probs=True, top_log_probs=3, **USUAL
    )
    for path in ("/completion", "/completions"):
        status, response = ask(house, path, body)
        assert (status, response["content"], response["tokens"]) == (200, generation.text, generation.ids)
        assert (response["tokens_predicted"], response["stop_type"], response["stop"]) == (
            len(generation.ids),
            "limit",
            True,
        )
        assert response["prompt"] == "<|begin|>the cat"
        settings = response["generation_settings"]
        assert (settings["n_predict"], settings["seed"], settings["top_k"]) == (9, 4, 40)
        rows = response["completion_probabilities"]
        assert [row["id"] for row in rows] == generation.ids
        assert [row["logprob"] for row in rows] == pytest.approx(generation.log_probs, abs=2e-5)
        assert [[candidate["id"] for candidate in row["top_logprobs"]] for row in rows] == [
            [token for token, _ in place] for place in generation.top_log_probs
        ]
    events = lines(house, "/completion", body)
    assert "".join(event["content"] for event in events) == generation.text
    assert [i for event in events for i in event["tokens"]] == generation.ids
    assert [event["stop"] for event in events] == [False] * 9 + [True]
    rows = [row for event in events[:-1] for row in event["completion_probabilities"]]
    assert [row["id"] for row in rows] == generation.ids
    assert [row["logprob"] for row in rows] == pytest.approx(generation.log_probs, abs=2e-5)


def test_settings_of_llama(house: House) -> None:
    lm = model_of(house)
    [eos] = lm.eos
    tokenizer = lm.need_tokenizer()
    unconstrained = lm.generate("the", max_new_tokens=20).text
    greedy = {"prompt": "the", "n_predict": 20, "temperature": 0}
    response = ask(house, "/completion", {**greedy, "stop": [unconstrained[3:5]]})[1]
    assert (response["content"], response["stop_type"], response["stopping_word"]) == (
        unconstrained[: unconstrained.index(unconstrained[3:5])],
        "word",
        unconstrained[3:5],
    )
    response = ask(house, "/completion", {**greedy, "logit_bias": [[eos, 900]]})[1]
    assert (response["content"], response["stop_type"]) == ("", "eos")
    response = ask(house, "/completion", {**greedy, "logit_bias": [[eos, 900]], "ignore_eos": True})[1]
    assert (response["tokens_predicted"], response["stop_type"]) == (20, "limit")
    never = {token: float("-inf") for token in tokenizer.encode("e t", bos=False)}
    for bias in ([["e t", False]], {"e t": False}, [[token, False] for token in never]):
        response = ask(house, "/completion", {**greedy, "logit_bias": bias})[1]
        assert response["content"] == lm.generate("the", max_new_tokens=20, bias=never).text
    for name in ("repeat_penalty", "repetition_penalty"):
        response = ask(house, "/completion", {**greedy, name: 1.7, "top_k": 1})[1]
        assert response["content"] == lm.generate("the", max_new_tokens=20, repetition_penalty=1.7).text
    status, response = ask(house, "/completion", {**greedy, "repeat_penalty": 1.7, "repetition_penalty": 1.0})
    assert (status, "give one" in response["error"]["message"]) == (400, True)
    response = ask(house, "/completion", {**greedy, "logit_bias": [[5, 2.5]], "ignore_eos": True})[1]
    assert response["generation_settings"]["logit_bias"] == [
        {"token": 5, "bias": 2.5},
        {"token": eos, "bias": None},
    ]
    fields = ["content", "generation_settings/n_predict", "none"]
    response = ask(house, "/completion", {**greedy, "response_fields": fields})[1]
    assert response == {"content": unconstrained, "generation_settings/n_predict": 20}
    response = ask(house, "/completion", {"prompt": "the", "temperature": 0, "ignore_eos": True})[1]
    assert (response["tokens_evaluated"] + response["tokens_predicted"], response["truncated"]) == (512, True)


def test_prompts_are_texts_ids_or_both(house: House) -> None:
    lm, options = model_of(house), {"n_predict": 5, "temperature": 0}
    ids = lm.need_tokenizer().encode("the cat", eos=False)
    text = lm.generate("the cat", max_new_tokens=5).text
    assert ask(house, "/completion", {"prompt": ids, **options})[1]["content"] == text
    completions = ask(house, "/completion", {"prompt": [ids, "the cat"], **options})[1]
    assert [completion["content"] for completion in completions] == [text, text]  # type: ignore[index]
    with_key = {"prompt_string": "the cat"}
    assert ask(house, "/completion", {"prompt": with_key, **options})[1]["content"] == text
    assert ask(house, "/completion", {"prompt": [with_key, ids], **options})[1][0]["content"] == text  # type: ignore[index]
    mixed = ask(house, "/completion", {"prompt": [*ids, " sat", 40], **options})[1]
    ids_of_mixed = [*ids, *lm.need_tokenizer().encode(" sat", bos=False), 40]
    assert mixed["content"] == lm.generate(ids_of_mixed, max_new_tokens=5).text


def test_grammars_of_llama(house: House) -> None:
    body = {"prompt": "the", "n_predict": 40, "seed": 1}
    for constraint in ({"grammar": 'root ::= "yes" | "no"'}, {"json_schema": {"enum": ["yes", "no"]}}):
        response = ask(house, "/completion", {**body, **constraint})[1]
        assert (response["content"].strip('"') in ("yes", "no"), response["stop_type"]) == (True, "eos")
    status, response = ask(house, "/completion", {**body, "grammar": "root :: ="})
    assert (status, "grammar" in response["error"]["message"]) == (400, True)


@pytest.mark.parametrize("text", ["the cat sat", "猫🙂", "a<|user|>b", " "])
def test_tokens_there_and_back(house: House, text: str) -> None:
    tokenizer = model_of(house).need_tokenizer()
    response = ask(house, "/tokenize", {"prompt": text, "return_token_strs": True})[1]
    assert response["tokens"] == tokenizer.encode(text, eos=False)
    assert (response["count"], response["max_model_len"]) == (len(response["tokens"]), 512)
    assert response["token_strs"] == [tokenizer.token(i) for i in response["tokens"]]
    pieces = ask(house, "/tokenize", {"content": text, "with_pieces": True})[1]["tokens"]
    assert [piece["id"] for piece in pieces] == tokenizer.encode(text, bos=False, special=True)
    spelled = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"])
        for piece in pieces
    )
    assert spelled.decode() == text
    detokenized = ask(house, "/detokenize", {"tokens": [piece["id"] for piece in pieces]})[1]
    assert detokenized == {"prompt": text, "content": text}
    messages = [{"role": "user", "content": text}]
    assert ask(house, "/tokenize", {"messages": messages})[1]["tokens"] == tokenizer.render_chat(messages)
    template = ask(house, "/apply-template", {"messages": messages})[1]
    assert template["prompt"] == tokenizer.decode(tokenizer.render_chat(messages), special=True)
    assert text in template["prompt"]
    prompt_ids = tokenizer.render_chat(messages, add_generation_prompt=False)
    body = {"messages": messages, "add_generation_prompt": False}
    assert ask(house, "/apply-template", body)[1] == {"prompt": tokenizer.decode(prompt_ids, special=True)}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "tokenize takes one of prompt, content"),
        (
            "/tokenize",
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            "tokenize takes one of",
        ),
        ("/detokenize", {"tokens": [99999]}, "not in the vocabulary"),
        ("/completion", {"prompt": "x" * 600}, "exceeds the available context size"),
        ("/completion", {"prompt": []}, "no prompts"),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}}, "prompt"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "none of the tokens"),
        (
            "/infill",
            {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "x"}]},
            "input_extra",
        ),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "none of the tokens"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "suffix and echo"),
    ],
)
def test_what_is_wrong_is_said(house: House, path: str, body: dict[str, Any], words: str) -> None:
    status, response = ask(house, path, body)
    assert status == 400
    assert words in response["error"]["message"]


def test_gaps_are_filled_by_tokens_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    tokenizer = train_bpe(CORPUS, 330, special_tokens=marks)
    lm = LanguageModel(small(Causal(), context=512, vocab=max(330, tokenizer.vocab_size)), tokenizer)
    monkeypatch.setattr(conftest, "talker", lambda: lm)
    ids = infill(tokenizer, "the cat", " on the log")
    text = lm.generate(ids, max_new_tokens=7).text
    options = {"temperature": 0}
    with serving() as house:
        body = {"prompt": "the cat", "suffix": " on the log", "max_tokens": 7, **options}
        assert ask(house, "/v1/completions", body)[1]["choices"][0]["text"] == text
        body = {
            "input_prefix": "the ",
            "prompt": "cat",
            "input_suffix": " on the log",
            "n_predict": 7,
            **options,
        }
        assert ask(house, "/infill", body)[1]["content"] == text


def test_what_the_server_is_and_does(house: House) -> None:
    status, response = ask(house, "/props", method="GET")
    assert (status, response["default_generation_settings"]["n_ctx"], response["model_alias"]) == (
        200,
        512,
        "small",
    )
    assert response["default_generation_settings"]["params"]["top_k"] == 40
    assert response["chat_template"] == model_of(house).need_tokenizer().chat_template.source  # type: ignore[union-attr]
    assert ask(house, "/slots", method="GET")[1] == [{"id": 0, "n_ctx": 512, "is_processing": False}]
    assert ask(house, "/tokenizer_info?model=small", method="GET")[1]["eos_token"] == "<|end|>"
    assert ask(house, "/props?model=big", method="GET")[0] == 404
    assert ask(house, "/models", method="GET") == ask(house, "/v1/models", method="GET")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert ask(house, "/chat/completions", body)[1]["object"] == "chat.completion"


def test_tokens_of_a_conversation_are_counted(house: House) -> None:
    messages = [{"role": "user", "content": "the cat sat"}]
    counted = ask(house, "/v1/chat/completions/input_tokens", {"messages": messages})[1]["input_tokens"]
    answer = ask(house, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})[1]
    assert counted == answer["usage"]["prompt_tokens"]
    items = ask(house, "/v1/responses/input_tokens", {"input": "the cat sat"})[1]
    assert items == {"object": "response.input_tokens", "input_tokens": counted}
