"""Anthropic's messages, requested by its own client; and content blocks, which responses have, too."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from headway.serve.messages import Messages
from tests.serve.conftest import Animal, House, serving, written

anthropic = pytest.importorskip("anthropic")
TALK = [{"role": "user", "content": "the cat sat"}]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 20}
GREEDY = {"temperature": 0}


@pytest.fixture
def client(house: House) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=house.url, api_key="none", max_retries=0) as anthropic_client:
        yield anthropic_client


def test_a_message_is_the_text_of_a_chat(house: House, client: Any) -> None:
    fields = {"model": "small", "max_tokens": 12, "messages": TALK, "system": "Be brief."}
    answer = client.messages.create(**fields, extra_body={"seed": 5, **SAMPLED})
    messages = [{"role": "system", "content": "Be brief."}, *TALK]
    assert answer.content[0].text == written(house, messages, max_new_tokens=12, seed=5, **SAMPLED)
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "small")
    assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("max_tokens", None, 12)
    ids = house.models.places["small"].model.lm.need_tokenizer().render_chat(messages)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(ids)
    again = client.messages.create(**fields, extra_body={"seed": 5, **SAMPLED})
    assert again.usage.cache_read_input_tokens > 0
    assert again.content[0].text == answer.content[0].text


def test_tokens_are_counted_without_writing(house: House, client: Any) -> None:
    counted = client.messages.count_tokens(
        model="small", messages=TALK, system=[{"type": "text", "text": "Be."}]
    )
    messages = [{"role": "system", "content": "Be."}, *TALK]
    assert counted.input_tokens == len(
        house.models.places["small"].model.lm.need_tokenizer().render_chat(messages)
    )


def test_a_stop_sequence_is_named(house: House, client: Any) -> None:
    whole = written(house, TALK, max_new_tokens=30)
    fields = {"model": "small", "max_tokens": 30, "messages": TALK, "extra_body": GREEDY}
    answer = client.messages.create(**fields, stop_sequences=["never there", whole[5:7]])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", whole[5:7])
    assert answer.content[0].text == whole[: whole.index(whole[5:7])]


def test_a_stream_is_the_message_and_its_events_are_in_order(house: House) -> None:
    fields = {"model": "small", "max_tokens": 9, "messages": TALK, "extra_body": GREEDY}

    async def ask() -> tuple[list[str], Any]:
        async with anthropic.AsyncAnthropic(
            base_url=house.url, api_key="none", max_retries=0
        ) as async_client:
            stream = await async_client.messages.create(**fields, stream=True)
            names = [event.type async for event in stream]
            async with async_client.messages.stream(**fields) as stream_of_message:
                return names, await stream_of_message.get_final_message()

    names, message = asyncio.run(ask())
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert message.content[0].text == written(house, TALK, max_new_tokens=9)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 9)


def test_halves_of_characters_are_held_back(house: House, client: Any) -> None:
    tokenizer = house.models.places["small"].model.lm.need_tokenizer()
    assert tokenizer.table is not None
    halves = [token for token, spelled in tokenizer.table.bytes_of.items() if spelled in (b"\xc3", b"\xa9")]
    bias = dict.fromkeys(halves, 60.0)
    extra_body = {"logit_bias": {str(token): value for token, value in bias.items()}, "seed": 1}
    fields = {"model": "small", "max_tokens": 40, "messages": TALK, "extra_body": extra_body}
    with client.messages.stream(**fields) as stream:
        pieces = [*stream.text_stream]
    assert "".join(pieces) == written(house, TALK, max_new_tokens=40, temperature=1.0, seed=1, bias=bias)
    assert "é" in pieces


def test_a_text_follows_the_schema_of_a_model(client: Any) -> None:
    fields = {"model": "small", "max_tokens": 200, "messages": TALK, "extra_body": {"seed": 2}}
    assert isinstance(client.messages.parse(**fields, output_format=Animal).parsed_output, Animal)


def test_a_tool_that_must_be_used_is_used_and_answered(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"on": {"enum": [1, 2]}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tools = [{"name": "find", "input_schema": schema}, {"type": "web_search_20250305", "name": "web_search"}]
    fields = {"model": "small", "max_tokens": 200, "tools": tools, "extra_body": {"seed": 4}}
    used = client.messages.create(**fields, messages=TALK, tool_choice={"type": "any"})
    [call] = used.content
    assert (call.type, call.name, call.input["on"] in (1, 2), used.stop_reason) == (
        "tool_use",
        "find",
        True,
        "tool_use",
    )
    with client.messages.stream(**fields, messages=TALK, tool_choice={"type": "any"}) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "found"}]}
    messages = [*TALK, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**fields, messages=messages, tool_choice={"type": "none"})
    assert answer.content[0].type == "text"


@pytest.mark.usefixtures("scripted")
def test_thoughts_and_calls_are_blocks(client: Any) -> None:
    fields = {"model": "small", "max_tokens": 6, "messages": TALK, "extra_body": GREEDY}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        events = [event for event in stream if event.type.startswith("content_block_")]
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, text, call, other = message.content
        assert (thought.type, thought.thinking, text.type, text.text) == (
            "thinking",
            "Hm.",
            "text",
            "Let me look.",
        )
        assert (call.type, call.name, call.input) == ("tool_use", "find", {"what": "猫"})
        assert (other.name, other.input) == ("stop", {})
        assert len({call.id, other.id}) == 2
    opened = [event.index for event in events if event.type == "content_block_start"]
    assert opened == [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]
    assert [event.type for event in events] == [
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop") * 3,
        *("content_block_start", "content_block_stop"),
    ]


@pytest.mark.usefixtures("scripted")
def test_a_call_that_is_whole_is_the_reason_to_stop(house: House, client: Any) -> None:
    text = written(house, TALK, max_new_tokens=30)
    fields = {"model": "small", "max_tokens": 30, "messages": TALK, "extra_body": GREEDY}
    halted = client.messages.create(**fields, stop_sequences=[text[5:7]])
    assert halted.stop_reason == "stop_sequence"
    assert client.messages.create(**fields).stop_reason == "max_tokens"
    [eos] = house.models.places["small"].model.lm.eos
    ended = client.messages.create(**{**fields, "extra_body": {"logit_bias": {str(eos): 1000}}})
    assert ended.stop_reason == "tool_use"


def test_a_conversation_with_tools_is_that_of_a_chat() -> None:
    used = {"type": "tool_use", "id": "t1", "name": "find", "input": {"what": "猫"}}
    gone = {"type": "tool_result", "tool_use_id": "t1", "content": "none", "is_error": True}
    body = Messages.model_validate(
        {
            "model": "m",
            "max_tokens": 3,
            "stop_sequences": ["x"],
            "top_k": 4,
            "seed": 2,
            "tools": [
                {"name": "find", "input_schema": {"type": "object"}, "description": "Finds."},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
            "tool_choice": {"type": "tool", "name": "find", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "h"}, used]},
                {"role": "user", "content": [gone, {"type": "text", "text": "so?"}]},
            ],
        }
    )
    chat = body.chat()
    assert [message.plain() for message in chat.messages] == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "h",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "t1",
                    "function": {"name": "find", "arguments": '{"what": "猫"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "error: none"},
        {"role": "user", "content": "so?"},
    ]
    find = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}
    dumped = chat.model_dump(by_alias=True, exclude_unset=True)
    assert dumped["tools"] == [{"type": "function", "function": find}]
    assert dumped["tool_choice"] == {"type": "function", "function": {"name": "find"}}
    assert (chat.max_tokens, chat.stop, chat.top_k, chat.seed) == (3, ["x"], 4, 2)
    assert dumped["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "type": "json_schema", "schema": {}},
    }
    assert chat.variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert body.unknown == ["thinking.budget_tokens", "tools.web_search_20250305"]


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"model": "smal"}, 404, "did you mean"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 2000}, 400, "trained on 512"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "'image'"),
        ({"extra_body": {"temperature": -1}}, 400, "temperature"),
        ({"tool_choice": {"type": "some"}}, 400, "tool_choice.type"),
        ({"tools": [{"input_schema": {}}]}, 400, "needs a name"),
    ],
)
def test_what_is_wrong_is_said_as_anthropic_does(
    client: Any, more: dict[str, Any], status: int, words: str
) -> None:
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**{"model": "small", "max_tokens": 3, "messages": TALK, **more})
    assert caught.value.status_code == status
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"].keys() == {"type", "message"}
    assert words in caught.value.body["error"]["message"]


def test_a_key_is_asked_for_as_anthropic_does() -> None:
    with serving(keys=["one"]) as house:
        with (
            anthropic.Anthropic(base_url=house.url, api_key="two", max_retries=0) as keyed_client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            keyed_client.messages.create(model="small", max_tokens=1, messages=TALK)
        assert caught.value.body["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=house.url, api_key="one", max_retries=0) as keyed_client:
            assert keyed_client.messages.create(model="small", max_tokens=1, messages=TALK).type == "message"


def test_what_changes_nothing_is_told(client: Any) -> None:
    fields = {"model": "small", "max_tokens": 1, "messages": TALK, "metadata": {"user_id": "me"}}
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(**fields, tools=tools, thinking=thinking)
    assert json.dumps(answer.warnings) == json.dumps(
        [
            "thinking.budget_tokens is unknown and was ignored",
            "tools.web_search_20250305 is unknown and was ignored",
            "enable_thinking is unknown to the chat template and was ignored",
        ]
    )
