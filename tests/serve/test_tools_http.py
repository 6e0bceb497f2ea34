"""Functions and reasoning over HTTP, requested by OpenAI's own client."""

import json
from typing import Any

import jsonschema
import pytest

from headway.serve.bodies import Chat
from headway.serve.tools import Prepared
from tests.serve.calls import FUNCTIONS, LM, SHORT
from tests.serve.conftest import House

openai = pytest.importorskip("openai")


ASKED = {
    "model": "small",
    "messages": [{"role": "user", "content": "go"}],
    "tools": FUNCTIONS[:1],
    "seed": 3,
    "temperature": 0.6,
    "max_completion_tokens": 120,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_calls_are_the_same_streamed(client: Any, choice: Any) -> None:
    fields = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(n=2, **fields)
    with client.chat.completions.stream(n=2, **fields) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        streamed_completion = stream.get_final_completion()
    for choice_of_whole, choice_of_stream in zip(whole.choices, streamed_completion.choices, strict=True):
        assert choice_of_whole.finish_reason == choice_of_stream.finish_reason == "tool_calls"
        assert choice_of_whole.message.content is None
        (call,), (streamed,) = choice_of_whole.message.tool_calls, choice_of_stream.message.tool_calls
        assert call.function.name == streamed.function.name == "f"
        assert call.function.arguments == streamed.function.arguments
        assert call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SHORT)
    assert whole.choices[0].message.tool_calls[0].id != whole.choices[1].message.tool_calls[0].id
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.delta.tool_calls]
    assert len(deltas) > 4


def test_text_is_that_of_generate_where_functions_are_there(client: Any) -> None:
    completion = client.chat.completions.create(**{**ASKED, "max_completion_tokens": 20})
    chat = Chat(**ASKED)
    generation = LM.generate(
        Prepared(chat, LM.need_tokenizer()).ids, seed=3, temperature=0.6, max_new_tokens=20
    )
    assert completion.choices[0].message.content == generation.text
    assert completion.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "h in tools"),
        ({"tool_choice": "required", "tools": []}, "a function in tools"),
        ({"tools": [{"type": "web_search"}]}, "function"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "name"),
        ({"tools": ASKED["tools"] * 129}, "tools"),  # type: ignore[operator]
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": {"a": {"multipleOf": 99_999_989}}}}}]}, "multipleOf"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages.0.tool_calls"),
        *(
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}, "parameters")
            for parameters in ({"properties": []}, {"required": 5}, {"properties": {"a": 5}})
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_with_functions_is_said(client: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(**{**ASKED, **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(client: Any, house: House, stream: bool) -> None:
    """Over HTTP, with a template that begins an answer within reasoning."""
    lm = house.models.places["small"].model.lm
    before = lm.tokenizer
    lm.tokenizer = before.with_chat_template("{{ messages[0].content }}<think>\n{# </think> #}")
    fields = {"model": "small", "messages": ASKED["messages"], "seed": 1, "max_completion_tokens": 30}
    try:
        answer = client.chat.completions.create(stream=stream, temperature=0.5, **fields)
        messages = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
        ids = lm.tokenizer.render_chat(fields["messages"])
    finally:
        lm.tokenizer = before
    expected = LM.generate(ids, seed=1, temperature=0.5, max_new_tokens=30).text.strip()
    thoughts = "".join(getattr(message, "reasoning_content", None) or "" for message in messages)
    assert thoughts.strip() == expected
    assert not any(message.content for message in messages)
