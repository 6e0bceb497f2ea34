"""Request bodies and responses of Anthropic's messages."""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from headway.errors import ConfigError
from headway.serve.answers import Block, BlockAnswer, Event, event
from headway.serve.bodies import Chat, Stops, TextRequest, text_of
from headway.serve.chats import Turns, chat_of, functions
from headway.serve.errors import warned


class Turn(BaseModel):
    """A message of one side: a text, or content blocks."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]

    def add_to(self, turns: Turns) -> None:
        """Adds the message to a chat, tool results before text. Raises ConfigError for blocks that are not text,
        reasoning or tools."""
        texts = [self.content] if isinstance(self.content, str) else []
        for block in [] if isinstance(self.content, str) else self.content:
            match self.role, block:
                case _, {"type": "text", "text": str(text)}:
                    texts.append(text)
                case "assistant", {"type": "thinking", "thinking": str(text)}:
                    turns.think(text)
                case "assistant", {
                    "type": "tool_use",
                    "id": str(key),
                    "name": str(name),
                    "input": dict(arguments),
                }:
                    turns.call(key, name, json.dumps(arguments, ensure_ascii=False))
                case "user", {"type": "tool_result", "tool_use_id": str(key), **more}:
                    failed = "error: " if more.get("is_error") else ""
                    turns.result(key, failed + text_of(more.get("content", "")))
                case _:
                    raise ConfigError(
                        f"messages: a block of type {block.get('type')!r} of the {self.role} is not supported, or "
                        f"lacks a field: {str(block)[:80]}"
                    )
        if texts:
            turns.say(self.role, "".join(texts))


class Thinking(BaseModel, extra="allow"):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(BaseModel, extra="allow"):
    """The format of the answer, and the effort of reasoning before it."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class ToolChoice(BaseModel, extra="allow"):
    """Which tools the model calls."""

    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class CountedMessages(TextRequest):
    """`POST /v1/messages/count_tokens`: counts the tokens of a conversation."""

    harmless: ClassVar[Collection[str]] = ("metadata", "service_tier", "cache_control", "inference_geo")

    messages: list[Turn] = Field(min_length=1)
    system: str | list[dict[str, Any]] = ""
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: Stops = Field([])
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
        tools = [{**tool, "type": kinds.get(tool.get("type"), tool.get("type"))} for tool in self.tools]
        return functions(tools, "input_schema")

    def chat(self) -> Chat:
        """Returns the request as a chat. Raises ConfigError for what a chat does not support."""
        choice, output_format = self.tool_choice, self.output_config.format
        kinds = {"any": "required", "tool": {"type": "function", "function": {"name": choice.name}}}
        turns = Turns()
        if self.system:
            turns.say("system", text_of(self.system))
        for turn in self.messages:
            turn.add_to(turns)
        return chat_of(
            self,
            turns,
            self._functions[0],
            tool_choice=kinds.get(choice.type, choice.type),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            response_format=output_format
            and {"type": output_format.get("type"), "json_schema": {"name": "answer", **output_format}},
            reasoning_effort=self.output_config.effort,
            chat_template_kwargs=self.thinking and {"enable_thinking": self.thinking.type != "disabled"},
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
        )


class Messages(CountedMessages):
    """`POST /v1/messages`: answers a conversation."""

    max_tokens: int = Field(ge=1)


STOPS = {"stop": "end_turn", "length": "max_tokens", None: None}
GROWING = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
GROWING["call"] = ("input_json_delta", "partial_json")
"""The type of a delta, and the field of its content, for each kind of block."""


class MessageAnswer(BlockAnswer):
    """The response of `POST /v1/messages`."""

    def begin(self) -> Sequence[Event]:
        return [event("message_start", message=self._message([])), event("ping")]

    def blank(self, i: int) -> Event:
        return event("ping")

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
        """Token counts; those from the prefix cache are counted separately."""
        read, cached = self.prompt_tokens, self.cached_tokens
        tokens = {"input_tokens": read - cached, "output_tokens": self.new_tokens}
        return tokens | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}

    @property
    def _stop(self) -> dict[str, Any]:
        stopped, reason = self.texts[0].stopped_by, STOPS[self.written[0].finish_reason]
        if reason == "end_turn" and self.blocks[-1].kind == "call":
            reason = "tool_use"
        return {"stop_reason": reason if stopped is None else "stop_sequence", "stop_sequence": stopped}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self.key}", "type": "message", "role": "assistant", "model": self.model.name}
        return head | {"content": content, **self._stop, "usage": self.usage, **warned(self.warnings)}

    def _told(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        arguments = None
        with suppress(ValueError):  # the text ended within its arguments, as the stop reason says
            arguments = json.loads(block.text or "{}")
        head = {"type": "tool_use", "id": f"toolu_{block.key}", "name": block.name}
        return head | {"input": arguments if isinstance(arguments, dict) else {}}
