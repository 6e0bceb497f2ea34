"""Conversations that are to be answered, in whichever protocol they came: each is the body of a chat completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.generate.sequences import SampledText
from headway.serve.bodies import Chat, TextRequest
from headway.serve.markup import CallReader
from headway.serve.served import Decoding
from headway.serve.server import Server
from headway.serve.tools import Prepared


@dataclass(frozen=True)
class Conversation:
    """The texts that answer a conversation, what is to be said of the request's fields, and what divides a text into
    its parts."""

    model: Decoding
    texts: list[SampledText]
    warnings: list[str]
    reader: Callable[[], CallReader] = CallReader


async def begin(server: Server, chat: Chat, asked: TextRequest) -> Conversation:
    """The texts of a chat; `asked` is the request as it came. Raises as `Server.begin` and `Decoding.texts`."""
    model, warnings = await server.begin(asked, Decoding)
    prepared = await prepare(model, chat, warnings)
    config = chat.config(grammar=await model.grammar(*prepared.grammar), shown=prepared.shown)
    texts = model.texts([prepared.ids], config, chat.n)
    return Conversation(model, texts, warnings, prepared.reader)


async def rendered(model: Decoding, chat: Chat, warnings: list[str]) -> list[int]:
    """The ids of a conversation; see `prepare`."""
    return (await prepare(model, chat, warnings)).ids


async def prepare(model: Decoding, chat: Chat, warnings: list[str]) -> Prepared:
    """A conversation, and its ids by the model's chat template; adds to the warnings what that does not know. Raises
    DataError where there is none, ConfigError as `Chat.check` and `Prepared`."""
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
        """Somebody says something."""
        if role == "assistant":
            self._turn["content"] += text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """An assistant thinks, before it answers."""
        self._turn["reasoning_content"] = self._turn.get("reasoning_content", "") + text

    def call(self, key: str, name: str, arguments: str) -> None:
        """An assistant calls a function."""
        function = {"name": name, "arguments": arguments}
        self._turn.setdefault("tool_calls", []).append({"type": "function", "id": key, "function": function})

    def result(self, key: str, text: str) -> None:
        """What a call gave."""
        self.messages.append({"role": "tool", "tool_call_id": key, "content": text})

    @property
    def _turn(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def functions(tools: Sequence[Mapping[str, Any]], schema: str = "parameters") -> tuple[list[Any], list[str]]:
    """Functions of other protocols, whose parameters are called `schema`, as chats tell them; and names of the tools
    that are no functions. Raises ConfigError for a function without a name."""
    made: list[Any] = []
    names = {"name": "name", "description": "description", schema: "parameters", "strict": "strict"}
    for tool in tools:
        if tool.get("type") == "function":
            if not isinstance(tool.get("name"), str):
                raise ConfigError(f"tools: a function has a name, got {str(tool)[:80]}")
            function = {names[field]: value for field, value in tool.items() if field in names}
            made.append({"type": "function", "function": function})
    return made, [f"tools.{tool.get('type')}" for tool in tools if tool.get("type") != "function"]
