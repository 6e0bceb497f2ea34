"""llama.cpp's completions, tokens there and back, gaps, and what the server is."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.api import LanguageModel
from headway.patterns import Causal
from headway.text import infill, train_bpe
from tests.generate.conftest import small
from tests.serve import conftest
from tests.serve.conftest import House, serving
from tests.serve.test_guard import ask
from tests.text.conftest import CORPUS


def model_of(house: House) -> LanguageModel:
    return house.models.places["small"].model.lm  # type: ignore[attr-defined, no-any-return]


def lines(house: House, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    address = urlsplit(house.url)
    there = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    there.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    told = there.getresponse().read().decode()
    there.close()
    return [
        json.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: {")
    ]


USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What llama.cpp does unless told otherwise."""


def test_a_completion_is_that_of_the_python_api(house: House) -> None:
    asked = {"prompt": "the cat", "n_predict": 9, "seed": 4, "n_probs": 3, "return_tokens": True}
    made = model_of(house).generate(
        "the cat", max_new_tokens=9, seed=4, log_probs=True, top_log_probs=3, **USUAL
    )
    for path in ("/completion", "/completions"):
        status, told = ask(house, path, asked)
        assert (status, told["content"], told["tokens"]) == (200, made.text, made.ids)
        assert (told["tokens_predicted"], told["stop_type"], told["stop"]) == (len(made.ids), "limit", True)
        assert told["prompt"] == "<|begin|>the cat"
        settings = told["generation_settings"]
        assert (settings["n_predict"], settings["seed"], settings["top_k"]) == (9, 4, 40)
        rows = told["completion_probabilities"]
        assert [row["id"] for row in rows] == made.ids
        assert [row["logprob"] for row in rows] == pytest.approx(made.log_probs, abs=2e-5)
        assert [[one["id"] for one in row["top_logprobs"]] for row in rows] == [
            [token for token, _ in place] for place in made.top_log_probs
        ]
    events = lines(house, "/completion", asked)
    assert "".join(event["content"] for event in events) == made.text
    assert [i for event in events for i in event["tokens"]] == made.ids
    assert [event["stop"] for event in events] == [False] * 9 + [True]
    rows = [row for event in events[:-1] for row in event["completion_probabilities"]]
    assert [row["id"] for row in rows] == made.ids
    assert [row["logprob"] for row in rows] == pytest.approx(made.log_probs, abs=2e-5)


def test_settings_of_llama(house: House) -> None:
    lm = model_of(house)
    [eos] = lm.eos
    tokenizer = lm.need_tokenizer()
    free = lm.generate("the", max_new_tokens=20).text
    greedy = {"prompt": "the", "n_predict": 20, "temperature": 0}
    told = ask(house, "/completion", {**greedy, "stop": [free[3:5]]})[1]
    assert (told["content"], told["stop_type"], told["stopping_word"]) == (
        free[: free.index(free[3:5])],
        "word",
        free[3:5],
    )
    told = ask(house, "/completion", {**greedy, "logit_bias": [[eos, 900]]})[1]
    assert (told["content"], told["stop_type"]) == ("", "eos")
    told = ask(house, "/completion", {**greedy, "logit_bias": [[eos, 900]], "ignore_eos": True})[1]
    assert (told["tokens_predicted"], told["stop_type"]) == (20, "limit")
    never = {token: float("-inf") for token in tokenizer.encode("e t", bos=False)}
    for bias in ([["e t", False]], {"e t": False}, [[token, False] for token in never]):
        told = ask(house, "/completion", {**greedy, "logit_bias": bias})[1]
        assert told["content"] == lm.generate("the", max_new_tokens=20, bias=never).text
    for name in ("repeat_penalty", "repetition_penalty"):
        told = ask(house, "/completion", {**greedy, name: 1.7, "top_k": 1})[1]
        assert told["content"] == lm.generate("the", max_new_tokens=20, repetition_penalty=1.7).text
    status, told = ask(house, "/completion", {**greedy, "repeat_penalty": 1.7, "repetition_penalty": 1.0})
    assert (status, "give one" in told["error"]["message"]) == (400, True)
    told = ask(house, "/completion", {**greedy, "logit_bias": [[5, 2.5]], "ignore_eos": True})[1]
    assert told["generation_settings"]["logit_bias"] == [
        {"token": 5, "bias": 2.5},
        {"token": eos, "bias": None},
    ]
    fields = ["content", "generation_settings/n_predict", "none"]
    told = ask(house, "/completion", {**greedy, "response_fields": fields})[1]
    assert told == {"content": free, "generation_settings/n_predict": 20}
    told = ask(house, "/completion", {"prompt": "the", "temperature": 0, "ignore_eos": True})[1]
    assert (told["tokens_evaluated"] + told["tokens_predicted"], told["truncated"]) == (512, True)


def test_prompts_are_texts_ids_or_both(house: House) -> None:
    lm, more = model_of(house), {"n_predict": 5, "temperature": 0}
    ids = lm.need_tokenizer().encode("the cat", eos=False)
    text = lm.generate("the cat", max_new_tokens=5).text
    assert ask(house, "/completion", {"prompt": ids, **more})[1]["content"] == text
    told = ask(house, "/completion", {"prompt": [ids, "the cat"], **more})[1]
    assert [one["content"] for one in told] == [text, text]  # type: ignore[index]
    named = {"prompt_string": "the cat"}
    assert ask(house, "/completion", {"prompt": named, **more})[1]["content"] == text
    assert ask(house, "/completion", {"prompt": [named, ids], **more})[1][0]["content"] == text  # type: ignore[index]
    mixed = ask(house, "/completion", {"prompt": [*ids, " sat", 40], **more})[1]
    whole = [*ids, *lm.need_tokenizer().encode(" sat", bos=False), 40]
    assert mixed["content"] == lm.generate(whole, max_new_tokens=5).text


def test_grammars_of_llama(house: House) -> None:
    asked = {"prompt": "the", "n_predict": 40, "seed": 1}
    for more in ({"grammar": 'root ::= "yes" | "no"'}, {"json_schema": {"enum": ["yes", "no"]}}):
        told = ask(house, "/completion", {**asked, **more})[1]
        assert (told["content"].strip('"') in ("yes", "no"), told["stop_type"]) == (True, "eos")
    status, told = ask(house, "/completion", {**asked, "grammar": "root :: ="})
    assert (status, "grammar" in told["error"]["message"]) == (400, True)


@pytest.mark.parametrize("text", ["the cat sat", "猫🙂", "a<|user|>b", " "])
def test_tokens_there_and_back(house: House, text: str) -> None:
    tokenizer = model_of(house).need_tokenizer()
    told = ask(house, "/tokenize", {"prompt": text, "return_token_strs": True})[1]
    assert told["tokens"] == tokenizer.encode(text, eos=False)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 512)
    assert told["token_strs"] == [tokenizer.token(i) for i in told["tokens"]]
    bare = ask(house, "/tokenize", {"content": text, "with_pieces": True})[1]["tokens"]
    assert [one["id"] for one in bare] == tokenizer.encode(text, bos=False, special=True)
    spelled = b"".join(
        one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in bare
    )
    assert spelled.decode() == text
    back = ask(house, "/detokenize", {"tokens": [one["id"] for one in bare]})[1]
    assert back == {"prompt": text, "content": text}
    messages = [{"role": "user", "content": text}]
    assert ask(house, "/tokenize", {"messages": messages})[1]["tokens"] == tokenizer.render_chat(messages)
    template = ask(house, "/apply-template", {"messages": messages})[1]
    assert template["prompt"] == tokenizer.decode(tokenizer.render_chat(messages), special=True)
    assert text in template["prompt"]
    bare = tokenizer.render_chat(messages, add_generation_prompt=False)
    asked = {"messages": messages, "add_generation_prompt": False}
    assert ask(house, "/apply-template", asked)[1] == {"prompt": tokenizer.decode(bare, special=True)}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "give prompt"),
        ("/detokenize", {"tokens": [99999]}, "not in the vocabulary"),
        ("/completion", {"prompt": "x" * 600}, "exceeds the available context size"),
        ("/completion", {"prompt": []}, "no prompts"),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}}, "prompt"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "no tokens for filling a gap"),
        (
            "/infill",
            {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "x"}]},
            "input_extra",
        ),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "no tokens for filling a gap"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "suffix with echo"),
    ],
)
def test_what_is_wrong_is_said(house: House, path: str, body: dict[str, Any], words: str) -> None:
    status, told = ask(house, path, body)
    assert status == 400
    assert words in told["error"]["message"]


def test_gaps_are_filled_by_tokens_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    tokenizer = train_bpe(CORPUS, 330, special_tokens=marks)
    lm = LanguageModel(small(Causal(), context=512, vocab=max(330, tokenizer.vocab_size)), tokenizer)
    monkeypatch.setattr(conftest, "talker", lambda: lm)
    ids = infill(tokenizer, "the cat", " on the log")
    text = lm.generate(ids, max_new_tokens=7).text
    more = {"temperature": 0}
    with serving() as house:
        asked = {"prompt": "the cat", "suffix": " on the log", "max_tokens": 7, **more}
        assert ask(house, "/v1/completions", asked)[1]["choices"][0]["text"] == text
        asked = {
            "input_prefix": "the ",
            "prompt": "cat",
            "input_suffix": " on the log",
            "n_predict": 7,
            **more,
        }
        assert ask(house, "/infill", asked)[1]["content"] == text


def test_what_the_server_is_and_does(house: House) -> None:
    status, told = ask(house, "/props", method="GET")
    assert (status, told["default_generation_settings"]["n_ctx"], told["model_alias"]) == (200, 512, "small")
    assert told["default_generation_settings"]["params"]["top_k"] == 40
    assert told["chat_template"] == model_of(house).need_tokenizer().chat_template.source  # type: ignore[union-attr]
    assert ask(house, "/slots", method="GET")[1] == [{"id": 0, "n_ctx": 512, "is_processing": False}]
    assert ask(house, "/tokenizer_info?model=small", method="GET")[1]["eos_token"] == "<|end|>"
    assert ask(house, "/props?model=big", method="GET")[0] == 404
    assert ask(house, "/models", method="GET") == ask(house, "/v1/models", method="GET")
    talk = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert ask(house, "/chat/completions", talk)[1]["object"] == "chat.completion"


def test_tokens_of_a_conversation_are_counted(house: House) -> None:
    said = [{"role": "user", "content": "the cat sat"}]
    counted = ask(house, "/v1/chat/completions/input_tokens", {"messages": said})[1]["input_tokens"]
    answer = ask(house, "/v1/chat/completions", {"messages": said, "max_tokens": 1})[1]
    assert counted == answer["usage"]["prompt_tokens"]
    items = ask(house, "/v1/responses/input_tokens", {"input": "the cat sat"})[1]
    assert items == {"object": "response.input_tokens", "input_tokens": counted}
