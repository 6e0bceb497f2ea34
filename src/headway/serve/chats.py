"""Conversations of all protocols: each becomes the body of a chat completion."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headway.errors import ConfigError
from headway.serve.answers import Answer
from headway.serve.bodies import Chat, TextRequest
from headway.serve.served import Decoding
from headway.serve.tools import Prepared


class Conversational(Protocol):
    """A request of any protocol that can be converted to a chat completion."""

    def chat(self) -> Chat: ...


async def answered(
    answer: type[Answer], model: Decoding, asked: Conversational, warnings: list[str]
) -> Answer:
    """Returns the response to a conversation, not yet generated. Raises what `prepare` and `Decoding.texts` raise."""
    prepared = await prepare(model, asked, warnings)
    config = prepared.chat.config(grammar=await model.grammar(*prepared.grammar), shown=prepared.shown)
    texts = model.texts([prepared.ids], config, prepared.chat.n)
    return answer(asked, model, texts, warnings, reader=prepared.reader)


async def prepare(model: Decoding, asked: Conversational, warnings: list[str]) -> Prepared:
    """Returns a conversation prepared for the model, with its token ids rendered by the chat template; adds warnings
    about what the template does not know. Raises DataError without a chat template, ConfigError as `Chat.check` and
    `Prepared` do."""
    chat = asked.chat()
    chat.check()
    prepared = Prepared(chat, model.lm.need_tokenizer())
    warnings += prepared.warnings
    await asyncio.to_thread(lambda: prepared.ids)
    return prepared


class Turns:
    """Builds the messages of a chat from the pieces of other protocols; consecutive thoughts, texts and calls of the
    assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, text: str) -> None:
        """Adds text that a role says."""
        if role == "assistant":
            self._turn["content"] += text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """Adds reasoning of the assistant."""
        self._turn["reasoning_content"] = self._turn.get("reasoning_content", "") + text

    def call(self, key: str, name: str, arguments: str) -> None:
        """Adds a function call by the assistant."""
        function = {"name": name, "arguments": arguments}
        self._turn.setdefault("tool_calls", []).append({"type": "function", "id": key, "function": function})

    def result(self, key: str, text: str) -> None:
        """Adds the result of a function call."""
        self.messages.append({"role": "tool", "tool_call_id": key, "content": text})

    @property
    def _turn(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def functions(tools: Sequence[Mapping[str, Any]], schema: str = "parameters") -> tuple[list[Any], list[str]]:
    """Converts the functions of another protocol, whose parameters are in the field `schema`, to those of a chat.
    Returns them and the types of the tools that are not functions. Raises ConfigError for a function without a name."""
    converted: list[Any] = []
    fields = {"name": "name", "description": "description", schema: "parameters", "strict": "strict"}
    for tool in tools:
        if tool.get("type") == "function":
            if not isinstance(tool.get("name"), str):
                raise ConfigError(f"tools: a function needs a name, got {str(tool)[:80]}")
            function = {fields[key]: value for key, value in tool.items() if key in fields}
            converted.append({"type": "function", "function": function})
    return converted, [f"tools.{tool.get('type')}" for tool in tools if tool.get("type") != "function"]


def chat_of(body: TextRequest, turns: Turns, tools: Sequence[Any], **fields: Any) -> Chat:
    """Returns a conversation of another protocol as a chat. Fields that are None are left out, and without tools those
    about tools too."""
    left = () if tools else ("tool_choice", "parallel_tool_calls")
    named = {name: value for name, value in fields.items() if value is not None and name not in left}
    return Chat.model_validate({**body.shared, "messages": turns.messages, "tools": tools or None, **named})
