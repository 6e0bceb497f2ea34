"""Anthropic's messages: what requests may say, and what is answered."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headway.errors import ConfigError
from headway.serve.answers import Event
from headway.serve.blocks import Block, BlockAnswer, event
from headway.serve.bodies import MOST_STOPS, Chat, TextRequest, function_named, functions
from headway.serve.errors import warned


class TextBlock(BaseModel):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    """What the model thought before it answered."""

    type: Literal["thinking"]
    thinking: str


class ToolUse(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _blocks(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Texts = Annotated[list[TextBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])]
"""A text, or blocks of it."""


class ToolResult(BaseModel):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = []
    is_error: bool = False


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUse | ToolResult, Field(discriminator="type")]


class Turn(BaseModel):
    """What one side says."""

    role: Literal["user", "assistant"]
    content: Annotated[list[AnyBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[AnyBlock])]

    def chat(self) -> list[dict[str, Any]]:
        """As messages of a chat: results of tools are messages of their own."""
        if self.role == "assistant":
            return [self._said()]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResult):
                text = ("error: " if block.is_error else "") + _text(block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif not isinstance(block, TextBlock):
                raise ConfigError(f"messages: a block of type {block.type!r} is said by an assistant alone")
            elif messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += block.text
            else:
                messages.append({"role": "user", "content": block.text})
        return messages

    def _said(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _text(self.content)}
        if thought := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            message["reasoning_content"] = thought
        if used := [block for block in self.content if isinstance(block, ToolUse)]:
            given = [json.dumps(one.input, ensure_ascii=False) for one in used]
            pairs = zip(used, given, strict=True)
            message["tool_calls"] = [{**function_named(one.name, text), "id": one.id} for one, text in pairs]
        return message


class Thinking(BaseModel):
    """Whether the model thinks before it answers."""

    model_config = ConfigDict(extra="allow")
    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(BaseModel):
    """What the text must be, and how much the model thinks before it."""

    model_config = ConfigDict(extra="allow")
    format: dict[str, Any] | None = None
    effort: str | None = None


class ToolChoice(BaseModel):
    """Which tools are called."""

    model_config = ConfigDict(extra="allow")
    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class CountedMessages(TextRequest):
    """`POST /v1/messages/count_tokens`: a conversation."""

    harmless: ClassVar[Collection[str]] = ("metadata", "service_tier", "cache_control", "inference_geo")

    messages: list[Turn] = Field(min_length=1)
    system: Texts = Field([])
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: list[str] = Field([], max_length=MOST_STOPS)
    tools: list[dict[str, Any]] = Field([])
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    @property
    def unknown(self) -> list[str]:
        return [*super().unknown, *self._functions[1]]

    @property
    def _functions(self) -> tuple[list[dict[str, Any]], list[str]]:
        kinds = {None: "function", "custom": "function"}
        own = [{**tool, "type": kinds.get(tool.get("type"), tool.get("type"))} for tool in self.tools]
        return functions(own, "input_schema")

    def chat(self) -> Chat:
        """The same as the body of a chat. Raises ConfigError for what a chat cannot be asked."""
        more: dict[str, Any] = {}
        if tools := self._functions[0]:
            choice = self.tool_choice
            kinds = {"any": "required", "tool": function_named(choice.name)}
            more |= {"tools": tools, "tool_choice": kinds.get(choice.type, choice.type)}
            more["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if form := self.output_config.format:
            more["response_format"] = {"type": form.get("type"), "json_schema": {"name": "answer", **form}}
        if self.output_config.effort is not None:
            more["reasoning_effort"] = self.output_config.effort
        if self.thinking is not None:
            more["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        messages = [*system, *(message for turn in self.messages for message in turn.chat())]
        limits = {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}
        return Chat.model_validate({**self.shared, **limits, "messages": messages, **more})


class Messages(CountedMessages):
    """`POST /v1/messages`: a conversation that is answered."""

    max_tokens: int = Field(ge=1)


def _text(blocks: Sequence[Any]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


STOPS = {"stop": "end_turn", "length": "max_tokens", None: None}
GROWING = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
GROWING["call"] = ("input_json_delta", "partial_json")
"""Of each kind of block: the type of a delta, and its field."""


class MessageAnswer(BlockAnswer):
    """Of `POST /v1/messages`."""

    def begin(self) -> Sequence[Event]:
        return [event("message_start", message=self._message([])), event("ping")]

    def open(self, block: Block) -> Sequence[Event]:
        return [event("content_block_start", index=block.index, content_block=self._told(block))]

    def grow(self, block: Block, more: str) -> Sequence[Event]:
        kind, name = GROWING[block.kind]
        return [event("content_block_delta", index=block.index, delta={"type": kind, name: more})]

    def close(self, block: Block) -> Sequence[Event]:
        return [event("content_block_stop", index=block.index)]

    def end(self) -> Sequence[Event]:
        return [event("message_delta", delta=self._stop, usage=self.usage), event("message_stop")]

    def fail(self, status: int, message: str) -> Sequence[Event]:
        return [event("error", error={"type": "api_error", "message": message})]

    def whole(self) -> dict[str, Any]:
        return self._message([self._told(block) for block in self.blocks])

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens; those that were stored are apart."""
        given, cached = self.prompt_tokens, self.cached_tokens
        told = {"input_tokens": given - cached, "output_tokens": self.new_tokens}
        return told | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}

    @property
    def _stop(self) -> dict[str, Any]:
        stopped, reason = self.texts[0].stopped_by, STOPS[self.written[0].finish_reason]
        if reason == "end_turn" and self.blocks[-1].kind == "call":
            reason = "tool_use"
        return {"stop_reason": reason if stopped is None else "stop_sequence", "stop_sequence": stopped}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        told = {"id": f"msg_{self.key}", "type": "message", "role": "assistant", "model": self.model.name}
        return told | {"content": content, **self._stop, "usage": self.usage, **warned(self.warnings)}

    def _told(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        given = _object(block.text)
        return {"type": "tool_use", "id": f"toolu_{block.key}", "name": block.name, "input": given}


def _object(text: str) -> dict[str, Any]:
    """Arguments; none where the text ended within them, which the stop reason tells."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
