"""Conversations that are to be answered, in whichever protocol they came: each is the body of a chat completion."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.errors import ConfigError
from headway.serve.answers import Answer
from headway.serve.bodies import Chat, TextRequest
from headway.serve.served import Decoding
from headway.serve.tools import Prepared


class Conversational(Protocol):
    """A request of a protocol whose conversations are chats."""

    def chat(self) -> Chat: ...


async def answered(
    answer: type[Answer], model: Decoding, asked: Conversational, warnings: list[str]
) -> Answer:
    """The answer to a conversation. Raises as `prepare` and `Decoding.texts`."""
    prepared = await prepare(model, asked, warnings)
    config = prepared.chat.config(grammar=await model.grammar(*prepared.grammar), shown=prepared.shown)
    texts = model.texts([prepared.ids], config, prepared.chat.n)
    return answer(asked, model, texts, warnings, reader=prepared.reader)


async def prepare(model: Decoding, asked: Conversational, warnings: list[str]) -> Prepared:
    """A conversation, and its ids by the model's chat template; adds to the warnings what that does not know. Raises
    DataError where there is none, ConfigError as `Chat.check` and `Prepared`."""
    chat = asked.chat()
    chat.check()
    prepared = Prepared(chat, model.lm.need_tokenizer())
    warnings += prepared.warnings
    await asyncio.to_thread(lambda: prepared.ids)
    return prepared


class Turns:
    """Messages of a chat, as other protocols tell them, piece by piece. What an assistant thinks, says and calls in a
    row is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """Adds what somebody says."""
        if role == "assistant":
            self._turn["content"] += text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Adds what an assistant thinks before it answers."""
        self._turn["reasoning_content"] = self._turn.get("reasoning_content", "") + text

    def call(self, key: str, name: str, arguments: str) -> None:
        """Adds a call of a function by an assistant."""
        function = {"name": name, "arguments": arguments}
        self._turn.setdefault("tool_calls", []).append({"type": "function", "id": key, "function": function})

    def result(self, key: str, text: str) -> None:
        """Adds the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": key, "content": text})

    @property
    def _turn(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def functions(tools: Sequence[Mapping[str, Any]], schema: str = "parameters") -> tuple[list[Any], list[str]]:
    """Functions of other protocols, whose parameters are called `schema`, as chats tell them; and names of the tools
    that are no functions. Raises ConfigError for a function without a name."""
    converted: list[Any] = []
    names = {"name": "name", "description": "description", schema: "parameters", "strict": "strict"}
    for tool in tools:
        if tool.get("type") == "function":
            if not isinstance(tool.get("name"), str):
                raise ConfigError(f"tools: a function has a name, got {str(tool)[:80]}")
            function = {names[field]: value for field, value in tool.items() if field in names}
            converted.append({"type": "function", "function": function})
    return converted, [f"tools.{tool.get('type')}" for tool in tools if tool.get("type") != "function"]


def chat_of(body: TextRequest, turns: Turns, tools: Sequence[Any], **fields: Any) -> Chat:
    """The chat that a conversation of another protocol is: with these fields, of which None is left out, and without
    tools those that are about them, too."""
    left = () if tools else ("tool_choice", "parallel_tool_calls")
    named = {name: value for name, value in fields.items() if value is not None and name not in left}
    return Chat.model_validate({**body.shared, "messages": turns.messages, "tools": tools or None, **named})
