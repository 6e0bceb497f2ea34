"""Request bodies and responses of OpenAI's responses API. It is stateless: each request has its whole conversation."""

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from headway.errors import ConfigError
from headway.serve.answers import Block, BlockAnswer, Event, event
from headway.serve.bodies import HARMLESS, Chat, TextRequest, text_of
from headway.serve.chats import Turns, chat_of, functions
from headway.serve.errors import warned

KEPT = {"previous_response_id": "give the whole conversation as input", "conversation": "give it as input"}
KEPT |= {"background": "ask for a stream", "prompt": "give its text as input"}
"""Fields that only a server that stores its responses can serve, and what to do instead."""

TOLD = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning", "temperature", "text",
        "tool_choice", "top_p", "user")  # fmt: skip
"""Fields of a request that its response repeats."""


class TextFormat(BaseModel, extra="allow"):
    """The format of the text."""

    format: dict[str, Any] = {"type": "text"}


class Effort(BaseModel, extra="allow"):
    """How much the model reasons before it answers."""

    effort: str | None = None


class NamedFunction(BaseModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class Responses(TextRequest):
    """`POST /v1/responses`: answers a conversation."""

    harmless: ClassVar[Collection[str]] = (*HARMLESS, "stream_options", "max_tool_calls", "client_metadata",
        "prompt_cache_retention", "prompt_cache_options")  # fmt: skip

    input: str | list[dict[str, Any]] = ""
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
        extra = self.model_extra or {}
        empty = {name for name in KEPT if not extra.get(name)}
        ignored = [f"include.{name}" for name in self.include or [] if name != "reasoning.encrypted_content"]
        if self.truncation == "auto":
            ignored.append("truncation")
        return [*sorted({*super().unknown} - empty), *ignored, *functions(self.tools)[1]]

    def chat(self) -> Chat:
        """Returns the request as a chat. Raises ConfigError for what a chat does not support."""
        for name, instead in KEPT.items():
            if (self.model_extra or {}).get(name):
                raise ConfigError(f"{name}: this server keeps no responses; {instead}")
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        output_format = self.text.format
        schema = {name: value for name, value in output_format.items() if name != "type"}
        forms = {"text": None, "json_schema": {"type": "json_schema", "json_schema": schema}}
        return chat_of(
            self,
            self._turns(),
            functions(self.tools)[0],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=forms.get(output_format.get("type", ""), output_format),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            max_tokens=self.max_output_tokens,
        )

    def _turns(self) -> Turns:
        turns = Turns()
        if self.instructions:
            turns.say("system", self.instructions)
        items = [{"content": self.input}] if isinstance(self.input, str) else self.input
        for item in items or [{"content": ""}]:
            match {"type": "message", "role": "user", **item}:
                case {
                    "type": "message",
                    "role": "system" | "developer" | "user" | "assistant" as role,
                    **more,
                }:
                    turns.say(role, text_of(more.get("content")))
                case {"type": "reasoning", **more}:
                    turns.think(text_of(more.get("content") or more.get("summary") or ""))
                case {
                    "type": "function_call",
                    "call_id": str(key),
                    "name": str(name),
                    "arguments": str(text),
                }:
                    turns.call(key, name, text)
                case {"type": "function_call_output", "call_id": str(key), "output": output}:
                    turns.result(key, text_of(output))
                case _:
                    raise ConfigError(
                        f"input: an item of type {item.get('type')!r} is not supported, or lacks a field: "
                        f"{str(item)[:80]}"
                    )
        return turns

    @property
    def told(self) -> dict[str, Any]:
        """The fields of the request that its response repeats."""
        tools = [tool for tool in self.tools if tool.get("type") == "function"]
        fields = {"metadata": None, **self.model_dump(include={*TOLD})}
        return {**fields, "tools": tools, "truncation": "disabled", "store": False}


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text": ("msg", "output_text", {"type": "message", "role": "assistant"}),
    "reasoning": ("rs", "reasoning_text", {"type": "reasoning", "summary": []}),
    "call": ("fc", "function_call_arguments", {"type": "function_call"}),
}
"""For each kind of block: the prefix of its id, the name of its part and events, and the constant fields of its
item."""


class ResponseAnswer(BlockAnswer):
    """The response of `POST /v1/responses`."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._told, self._numbers = self.asked.told, count()

    def begin(self) -> Sequence[Event]:
        started = self._response("in_progress")
        return [self._event(name, response=started) for name in ("created", "in_progress")]

    def blank(self, i: int) -> Event:
        return self._event("in_progress", response=self._response("in_progress"))

    def open(self, block: Block) -> Sequence[Event]:
        item = self._item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        added = self._event("output_item.added", output_index=block.index, item=item)
        return [added, *self._of_part("added", block)]

    def grow(self, block: Block, more: str) -> Sequence[Event]:
        return [self._of_text("delta", block, {"delta": more})]

    def close(self, block: Block) -> Sequence[Event]:
        is_call = block.kind == "call"
        content = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
        events = [self._of_text("done", block, content), *self._of_part("done", block)]
        return [*events, self._event("output_item.done", output_index=block.index, item=self._ended(block))]

    def end(self) -> Sequence[Event]:
        response = self.whole()
        return [self._event(response["status"], response=response)]

    def fail(self, status: int, message: str) -> Sequence[Event]:
        error = {"code": "server_error", "message": message}
        return [self._event("failed", response=self._response("failed", error=error))]

    def whole(self) -> dict[str, Any]:
        cut = self.written[0].finish_reason == "length"
        read, new = self.prompt_tokens, self.new_tokens
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": read + new,
        }
        why = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        output = [self._ended(block) for block in self.blocks]
        return self._response("incomplete" if cut else "completed", output=output, usage=usage, **why)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        head = {"id": f"resp_{self.key}", "object": "response", "created_at": self.created, "status": status}
        none: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**head, "model": self.model.name, **none, **self._told, **warned(self.warnings), **more}

    def _event(self, step: str, **more: Any) -> Event:
        return event(f"response.{step}", sequence_number=next(self._numbers), **more)

    def _of_part(self, step: str, block: Block) -> list[Event]:
        """Returns the event about the content part of a text or of reasoning; none for a call."""
        if block.kind == "call":
            return []
        return [self._event(f"content_part.{step}", **self._place(block), part=self._part(block))]

    def _of_text(self, step: str, block: Block, content: dict[str, Any]) -> Event:
        likely: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"{KINDS[block.kind][1]}.{step}", **self._place(block), **content, **likely)

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {} if block.kind == "call" else {"content_index": 0}
        return {"item_id": f"{KINDS[block.kind][0]}_{block.key}", "output_index": block.index, **place}

    def _part(self, block: Block) -> dict[str, Any]:
        fields: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
        return {"type": KINDS[block.kind][1], "text": block.text, **fields}

    def _ended(self, block: Block) -> dict[str, Any]:
        cut = self.written[0].finish_reason == "length" and block is self.blocks[-1]
        return self._item(block, "incomplete" if cut else "completed")

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        prefix, _, fixed = KINDS[block.kind]
        content: dict[str, Any] = {"content": [self._part(block)]}
        if block.kind == "call":
            content = {"call_id": f"call_{block.key}", "name": block.name, "arguments": block.text}
        return {"id": f"{prefix}_{block.key}", "status": status, **fixed, **content}
