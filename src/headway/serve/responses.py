"""OpenAI's responses: what requests may say, and what is answered. Nothing is kept: each request has all of its
conversation."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headway.errors import ConfigError
from headway.serve.answers import Event
from headway.serve.blocks import Block, BlockAnswer, event
from headway.serve.bodies import HARMLESS, Chat, Part, TextRequest, function_named, functions, text_of
from headway.serve.chats import Conversation

KEPT = {"previous_response_id": "give the whole conversation as input", "conversation": "give it as input"}
KEPT |= {"background": "ask for a stream", "prompt": "give its text as input"}
"""Fields that need a server that keeps what it answered, and what to do instead."""


class Message(BaseModel):
    """What somebody says."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class FunctionCall(BaseModel):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutput(BaseModel):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class Reasoning(BaseModel):
    """What the model thought before it answered."""

    type: Literal["reasoning"]
    summary: list[Part] = []
    content: list[Part] | None = None


def _typed(given: Any) -> Any:
    return {"type": "message", **given} if isinstance(given, dict) else given


Item = Annotated[
    Annotated[Message | FunctionCall | FunctionOutput | Reasoning, Field(discriminator="type")],
    BeforeValidator(_typed),
]


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class TextFormat(BaseModel):
    """What the text must be."""

    model_config = ConfigDict(extra="allow")
    format: dict[str, Any] = {"type": "text"}


class Effort(BaseModel):
    """How much the model thinks before it answers."""

    model_config = ConfigDict(extra="allow")
    effort: str | None = None


class NamedFunction(BaseModel):
    """The one function that is to be called."""

    type: Literal["function"]
    name: str


class Responses(TextRequest):
    """`POST /v1/responses`: a conversation that is answered."""

    harmless: ClassVar[Collection[str]] = (*HARMLESS, "stream_options", "max_tool_calls", "client_metadata",
        "prompt_cache_retention", "prompt_cache_options")  # fmt: skip

    input: Annotated[list[Item], BeforeValidator(_items, json_schema_input_type=str | list[Item])] = Field([])
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=0)
    tools: list[dict[str, Any]] = Field([])
    tool_choice: Literal["auto", "none", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextFormat = TextFormat()
    reasoning: Effort | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def unknown(self) -> list[str]:
        more = self.model_extra or {}
        empty = {name for name in KEPT if not more.get(name)}
        told = [f"include.{name}" for name in self.include or [] if name != "reasoning.encrypted_content"]
        if self.truncation == "auto":
            told.append("truncation")
        return [*sorted({*super().unknown} - empty), *told, *functions(self.tools)[1]]

    def chat(self) -> Chat:
        """The same as the body of a chat. Raises ConfigError for what a chat cannot be asked."""
        for name, instead in KEPT.items():
            if (self.model_extra or {}).get(name):
                raise ConfigError(f"{name}: this server keeps no responses; {instead}")
        more: dict[str, Any] = {}
        if tools := functions(self.tools)[0]:
            choice = self.tool_choice
            named = choice if isinstance(choice, str) else function_named(choice.name)
            more |= {"tools": tools, "tool_choice": named, "parallel_tool_calls": self.parallel_tool_calls}
        if self.text.format.get("type") != "text":
            form = {name: value for name, value in self.text.format.items() if name != "type"}
            more["response_format"] = {"type": self.text.format.get("type"), "json_schema": form}
        if self.reasoning is not None and self.reasoning.effort is not None:
            more["reasoning_effort"] = self.reasoning.effort
        return Chat.model_validate(
            {**self.shared, "messages": self._messages(), "max_tokens": self.max_output_tokens, **more}
        )

    def _messages(self) -> list[dict[str, Any]]:
        """As messages of a chat: what an assistant thinks, says and calls in a row is one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input or [Message(type="message", role="user", content="")]:
            if isinstance(item, FunctionOutput):
                output = text_of(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            elif isinstance(item, Message) and item.role != "assistant":
                messages.append({"role": item.role, "content": text_of(item.content)})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                _say(messages[-1], item)
        return messages

    @property
    def told(self) -> dict[str, Any]:
        """What a response tells again of its request."""
        names = {"instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "text", "top_p"}
        told = self.model_dump(include=names | {"tool_choice", "reasoning"})
        skipped = functions(self.tools)[1]
        told["tools"] = [tool for tool in self.tools if f"tools.{tool.get('type')}" not in skipped]
        more = {
            name: (self.model_extra or {}).get(name) for name in ("metadata", "user", "previous_response_id")
        }
        return told | more | {"truncation": "disabled", "store": False, "background": False}


def _say(message: dict[str, Any], item: Message | FunctionCall | Reasoning) -> None:
    """Adds an item to an assistant's message."""
    if isinstance(item, Message):
        message["content"] += text_of(item.content)
    elif isinstance(item, Reasoning):
        thought = text_of(item.content or item.summary)
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    else:
        call = function_named(item.name, item.arguments) | {"id": item.call_id}
        message["tool_calls"] = [*message.get("tool_calls", []), call]


PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
"""Of each kind of block: what its key begins with, and its events."""


class ResponseAnswer(BlockAnswer):
    """Of `POST /v1/responses`. `asked`: what is told again of the request."""

    def __init__(self, talk: Conversation, asked: dict[str, Any]) -> None:
        super().__init__(talk)
        self._asked, self._created, self._numbers = asked, int(time.time()), count()

    def begin(self) -> Sequence[Event]:
        started = self._response("in_progress")
        return [self._event(f"response.{name}", response=started) for name in ("created", "in_progress")]

    def open(self, block: Block) -> Sequence[Event]:
        events = [self._of_item("added", block, "in_progress", empty=True)]
        if block.kind != "call":
            part = self._part(block)
            events.append(self._event("response.content_part.added", **self._place(block), part=part))
        return events

    def grow(self, block: Block, more: str) -> Sequence[Event]:
        return [self._of_text("delta", block, {"delta": more})]

    def close(self, block: Block) -> Sequence[Event]:
        field = "arguments" if block.kind == "call" else "text"
        more = {"name": block.name} if block.kind == "call" else {}
        events = [self._of_text("done", block, {field: block.text, **more})]
        if block.kind != "call":
            part = self._part(block)
            events.append(self._event("response.content_part.done", **self._place(block), part=part))
        return [*events, self._of_item("done", block, self._status_of(block))]

    def end(self) -> Sequence[Event]:
        response = self.whole()
        return [self._event(f"response.{response['status']}", response=response)]

    def fail(self, status: int, message: str) -> Sequence[Event]:
        error = {"code": "server_error", "message": message}
        return [self._event("response.failed", response={**self._response("failed"), "error": error})]

    def whole(self) -> dict[str, Any]:
        cut = self.written[0].finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response["output"] = [self._item(block, self._status_of(block)) for block in self.blocks]
        if cut:
            return response | {"incomplete_details": {"reason": "max_output_tokens"}, "usage": self.usage}
        return response | {"completed_at": int(time.time()), "usage": self.usage}

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens."""
        given, new = self.prompt_tokens, self.new_tokens
        return {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + new,
        }

    def _response(self, status: str) -> dict[str, Any]:
        told = {"id": f"resp_{self.key}", "object": "response", "created_at": self._created, "status": status}
        told |= {
            "error": None,
            "incomplete_details": None,
            "model": self.model.name,
            "output": [],
            "usage": None,
        }
        return told | self._asked | self.told_warnings

    def _event(self, kind: str, **more: Any) -> Event:
        return event(kind, sequence_number=next(self._numbers), **more)

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {
            "item_id": f"{PREFIXES[block.kind]}_{block.key}",
            "output_index": block.index,
        }
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _of_text(self, step: str, block: Block, more: dict[str, Any]) -> Event:
        likely: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"response.{EVENTS[block.kind]}.{step}", **self._place(block), **more, **likely)

    def _of_item(self, step: str, block: Block, status: str, empty: bool = False) -> Event:
        item = self._item(block, status)
        if empty and block.kind != "call":
            item["content"] = []
        return self._event(f"response.output_item.{step}", output_index=block.index, item=item)

    def _status_of(self, block: Block) -> str:
        cut = self.written[0].finish_reason == "length" and block is self.blocks[-1]
        return "incomplete" if cut else "completed"

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": f"{PREFIXES[block.kind]}_{block.key}", "status": status}
        if block.kind == "call":
            item |= {"type": "function_call", "call_id": f"call_{block.key}", "name": block.name}
            return item | {"arguments": block.text}
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": [self._part(block)]}
        return item | {"type": "message", "role": "assistant", "content": [self._part(block)]}
