"""How families of models write calls of functions and reasoning: known by what their chat templates say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Tags(NamedTuple):
    """Arguments one by one: key, name of a parameter, end_key, value, its value, end_value."""

    key: str
    end_key: str
    value: str
    end_value: str


@dataclass(frozen=True)
class CallFormat:
    """Calls as a family writes them: open, a call, (between, a call)*, close. Spaces and line breaks at the ends of
    these are how they are written; in what is read they may be others, or none.

    found: what templates of the family have, all of it.
    keys: of a call that is one JSON object, {"name": ..., "arguments": {...}}: what these two are called.
    head: of any other call: what stands before the function's name, between it and its arguments, and behind them. The
        arguments are a JSON object, or are `tags`.
    """

    found: tuple[str, ...]
    open: str = ""
    between: str = ""
    close: str = ""
    keys: tuple[str, str] = ("name", "arguments")
    head: tuple[str, str, str] | None = None
    tags: Tags | None = None

    @property
    def marker(self) -> str:
        """What calls begin with, after text; "" where they are an object at the beginning of a text."""
        return self.open.strip().rstrip("[")

    @property
    def written(self) -> tuple[str, str, str]:
        """What stands before a function's name, between it and its arguments, and behind them."""
        name, arguments = self.keys
        return self.head or (f'{{"{name}": "', f'", "{arguments}": ', "}")


def _listed(open: str, close: str, *found: str, keys: tuple[str, str] = ("name", "arguments")) -> CallFormat:
    """Objects in a list."""
    return CallFormat(found or (open,), f"{open}[", ", ", f"]{close}", keys)


HERMES = CallFormat(("<tool_call>",), "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""What models are told to write whose templates say nothing of functions."""
_QWEN = ("<function=", ">\n", "</function>")
_GLM = Tags("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n")
_INVOKE = ('<invoke name="', '">\n', "</invoke>")
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"
FORMATS = (
    CallFormat(
        ("<seed:tool_call>",), "<seed:tool_call>\n", "\n</seed:tool_call>\n<seed:tool_call>\n", "\n</seed:tool_call>",
        head=_QWEN, tags=Tags("<parameter=", ">", "", "</parameter>\n"),
    ),
    CallFormat(
        ("<tool_call>", "<parameter="), HERMES.open, HERMES.between, HERMES.close,
        head=_QWEN, tags=Tags("<parameter=", ">\n", "", "\n</parameter>\n"),
    ),
    CallFormat(
        ("<arg_key>",), "<tool_call>", "</tool_call>\n<tool_call>", "</tool_call>", head=("", "\n", ""), tags=_GLM
    ),
    CallFormat(
        ("<minimax:tool_call>",), "<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>",
        head=_INVOKE, tags=Tags('<parameter name="', '">', "", "</parameter>\n"),
    ),
    CallFormat(
        ("<｜tool▁calls▁begin｜>", "```json"), *_DEEPSEEK,
        head=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
    ),
    CallFormat(
        ("<｜tool▁calls▁begin｜>",), *_DEEPSEEK,
        head=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallFormat(
        ("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>",
        head=("<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    CallFormat(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[TOOL_CALLS]", "", head=("", "[ARGS]", "")),
    _listed("[TOOL_CALLS]", ""),
    _listed("<|START_ACTION|>", "<|END_ACTION|>", keys=("tool_name", "parameters")),
    _listed("<TOOLCALL>", "</TOOLCALL>"),
    _listed("<tool_calls>", "</tool_calls>", "<tool_calls>["),
    CallFormat(("<tool_calls>",), "<tool_calls>\n", "\n", "\n</tool_calls>"),
    _listed("<|tool_call|>", "<|/tool_call|>", "<|/tool_call|>"),
    _listed("<|tool_call|>", ""),
    CallFormat(("<function=", "</function>"), "<function=", "<function=", "", head=("", ">", "</function>")),
    _listed(" functools", ""),
    CallFormat(("<|function_call|>",), "<|function_call|>", "<|function_call|>"),
    HERMES,
    CallFormat(("<|python_tag|>", '"parameters": '), between="; ", keys=("name", "parameters")),
    CallFormat(('{"name": "', '"parameters": '), between="; ", keys=("name", "parameters")),
)  # fmt: skip
"""The first that a template has is its own."""

REASONING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Marks around reasoning."""
PYTHON_TAG = "<|python_tag|>"
"""What Llama 3 may write before a call that is an object."""


def find_format(template: str) -> CallFormat | None:
    """The format of a chat template; None where it is told of no functions, or writes calls in a way of its own."""
    if "tools" not in template:
        return None
    return next((one for one in FORMATS if all(part in template for part in one.found)), None)


def find_reasoning(template: str) -> tuple[str, str] | None:
    """The marks around reasoning of a chat template."""
    return next((marks for marks in REASONING if marks[1] in template), None)
