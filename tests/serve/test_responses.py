"""OpenAI's responses, requested by its own client."""

import asyncio
import json
import re
from typing import Any

import pytest

from headway.serve.responses import Responses
from tests.serve.conftest import Animal, House, serving, written

openai = pytest.importorskip("openai")
TEXT = "output_item.added content_part.added (output_text.delta )+output_text.done content_part.done output_item.done"


def test_a_response_is_the_text_of_a_chat(house: House, client: Any) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.95}
    fields = {"model": "small", "input": "the cat sat", "instructions": "Be brief.", "max_output_tokens": 12}
    answer = client.responses.create(**fields, **sampled, extra_body={"seed": 5})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat sat"}]
    assert answer.output_text == written(house, messages, max_new_tokens=12, seed=5, **sampled)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.instructions, answer.temperature, answer.top_p) == ("Be brief.", 0.9, 0.95)
    ids = house.models.places["small"].model.lm.need_tokenizer().render_chat(messages)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(ids), 12)
    again = client.responses.create(**fields, **sampled, extra_body={"seed": 5})
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.output_text == answer.output_text


def test_a_stream_is_the_response_and_its_events_are_in_order(house: House, client: Any) -> None:
    fields = {"model": "small", "input": "the cat sat", "max_output_tokens": 9, "temperature": 0}
    events = [*client.responses.create(**fields, stream=True)]
    names = " ".join(event.type.removeprefix("response.") for event in events)
    assert re.fullmatch(f"created in_progress {TEXT} incomplete", names), names
    assert [event.sequence_number for event in events] == [*range(len(events))]
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    text = written(house, [{"role": "user", "content": "the cat sat"}], max_new_tokens=9)
    assert (
        streamed == events[-1].response.output_text == client.responses.create(**fields).output_text == text
    )
    assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}


def test_streams_and_parsing_of_the_client_itself(house: House, client: Any) -> None:
    [eos] = house.models.places["small"].model.lm.eos
    bias = {"logit_bias": {str(eos): 7.0}, "seed": 3}
    fields = {"model": "small", "input": [{"role": "user", "content": "go"}], "extra_body": bias}
    with client.responses.stream(**fields) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    assert types[-1] == "response.completed"
    assert final.status == "completed"
    expected = written(
        house,
        [{"role": "user", "content": "go"}],
        max_new_tokens=128,
        temperature=1.0,
        seed=3,
        bias={eos: 7.0},
    )
    assert final.output_text == client.responses.parse(**fields).output_text == expected

    async def ask() -> str:
        async with openai.AsyncOpenAI(
            base_url=f"{house.url}/v1", api_key="none", max_retries=0
        ) as async_client:
            return str((await async_client.responses.create(**fields)).output_text)

    assert asyncio.run(ask()) == expected


def test_a_text_follows_the_schema_of_a_model(client: Any) -> None:
    fields = {"model": "small", "input": "x", "max_output_tokens": 200, "extra_body": {"seed": 2}}
    animal = client.responses.parse(**fields, text_format=Animal).output_parsed
    assert isinstance(animal, Animal)
    with client.responses.stream(**fields, text_format=Animal) as stream:
        assert stream.get_final_response().output_parsed == animal
    response = client.responses.create(**fields, text={"format": {"type": "json_object"}}, temperature=0.3)
    assert response.output_text.startswith("{")


def test_a_function_that_must_be_called_is_called_and_answered(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"on": {"enum": [1, 2]}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "name": "find", "parameters": schema, "strict": True}]
    fields = {"model": "small", "max_output_tokens": 200, "tools": tools, "extra_body": {"seed": 4}}
    called = client.responses.create(**fields, input="x", tool_choice="required")
    [call] = called.output
    assert (call.type, call.name, json.loads(call.arguments)["on"] in (1, 2)) == (
        "function_call",
        "find",
        True,
    )
    with client.responses.stream(**fields, input="x", tool_choice="required") as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    items = [{"role": "user", "content": "x"}, *called.output, result]
    assert client.responses.create(**fields, input=items, tool_choice="none").output[0].type == "message"


@pytest.mark.usefixtures("scripted")
def test_thoughts_and_calls_are_items(client: Any) -> None:
    fields = {"model": "small", "input": "x", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = [*stream]
    last = events[-1].response
    for response in (whole, last):
        thought, message, call, other = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
        assert (message.type, message.content[0].text) == ("message", "Let me look.")
        assert (call.type, call.name, call.arguments) == ("function_call", "find", '{"what": "猫"}')
        assert (other.name, other.arguments) == ("stop", "")
        assert len({call.call_id, other.call_id, call.id, other.id}) == 4
    names = " ".join(event.type.removeprefix("response.") for event in events)
    assert names == (
        "created in_progress "
        "output_item.added content_part.added reasoning_text.delta reasoning_text.delta reasoning_text.done "
        "content_part.done output_item.done "
        "output_item.added content_part.added output_text.delta output_text.delta output_text.done "
        "content_part.done output_item.done "
        "output_item.added function_call_arguments.delta function_call_arguments.delta "
        "function_call_arguments.done output_item.done "
        "output_item.added function_call_arguments.done output_item.done incomplete"
    )
    ended = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [ended[i].to_dict() for i in range(4)] == [item.to_dict() for item in last.output]
    assert [item.status for item in last.output] == ["completed"] * 3 + ["incomplete"]


def test_a_conversation_with_tools_is_that_of_a_chat() -> None:
    body = Responses.model_validate(
        {
            "input": [
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "h"}]},
                {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "find", "arguments": "[]"},
                {"type": "function_call_output", "call_id": "c1", "output": "none"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "No."}]},
                {"role": "user", "content": "so?"},
            ],
            "instructions": "i",
            "tools": [
                {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True},
                {"type": "web_search"},
                {"type": "namespace", "name": "n"},
            ],
            "tool_choice": {"type": "function", "name": "find"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
            "reasoning": {"effort": "high", "summary": "auto"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "truncation": "auto",
            "previous_response_id": None,
            "store": True,
        }
    )
    chat = body.chat()
    calls = [
        {"type": "function", "id": f"c{n}", "function": {"name": "find", "arguments": arguments}}
        for n, arguments in ((1, "{}"), (2, "[]"))
    ]
    assert [message.plain() for message in chat.messages] == [
        {"role": "system", "content": "i"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "h", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "none"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "so?"},
    ]
    find = {"name": "find", "parameters": {"type": "object"}, "strict": True}
    dumped = chat.model_dump(by_alias=True, exclude_unset=True)
    assert dumped["tools"] == [{"type": "function", "function": find}]
    assert dumped["tool_choice"] == {"type": "function", "function": {"name": "find"}}
    assert dumped["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {}},
    }
    assert chat.variables == {"reasoning_effort": "high"}
    assert body.unknown == [
        *("reasoning.summary", "text.verbosity", "include.message.output_text.logprobs", "truncation"),
        *("tools.web_search", "tools.namespace"),
    ]
    assert [tool["name"] for tool in body.told["tools"]] == ["find"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"previous_response_id": "resp_1"}, "keeps no responses; give the whole conversation"),
        ({"background": True}, "keeps no responses"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "'input_image'",
        ),
        ({"input": [3]}, "input"),
        ({"tools": [{"type": "function"}]}, "needs a name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": 2000}, "trained on 512"),
    ],
)
def test_what_is_wrong_is_said(client: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "small", "input": "x", "max_output_tokens": 1, **more})
    assert words in caught.value.body["message"]


@pytest.mark.parametrize("given", ["", []])
def test_a_probe_of_nothing_is_answered(client: Any, given: Any) -> None:
    assert client.responses.create(model="small", input=given, max_output_tokens=1).usage.output_tokens == 1


def test_tools_of_others_are_skipped_by_name_or_refused(client: Any) -> None:
    fields: dict[str, Any] = {
        "input": "x",
        "max_output_tokens": 1,
        "tools": [{"type": "web_search"}],
        "store": False,
    }
    answer = client.responses.create(model="small", **fields)
    assert answer.warnings == ["tools.web_search is unknown and was ignored"]
    with (
        serving(strict=True) as strict,
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as strict_client,
        pytest.raises(openai.BadRequestError, match=r"tools\.web_search"),
    ):
        strict_client.responses.create(model="small", **fields)
