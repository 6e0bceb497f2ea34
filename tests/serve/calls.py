"""Functions, calls of them in the formats of model families, and chats that offer them."""

import json
from typing import Any

from headway.serve.bodies import Chat
from headway.serve.formats import ATEM, FORMATS, HARMONY, REASONING, CallFormat
from headway.serve.grammar import Grammars
from headway.serve.markup import Part
from headway.serve.tools import Prepared
from headway.text import Tokenizer
from tests.serve.conftest import talker

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"enum": [True, None, "x"]},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "additionalProperties": False}}},
]  # fmt: skip
LM = talker()
KIMI = next(marks for marks in REASONING if marks.open == "<|open|>think<|sep|>")
IDS = [call_format.found[-1] for call_format in FORMATS]
FRAMED = {"functions.": HARMONY, "<atem:invoke": ATEM, "argument": KIMI}
"""Reasoning formats of families that put marks around their texts, too."""


KINDS = {type(None): "null", bool: "boolean", int: "number", str: "string", list: "array", dict: "object"}


def spelled(call_format: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Returns calls as a family writes them."""
    written = []
    for name, arguments in calls:
        inner = json.dumps(arguments, ensure_ascii=False)
        if (tags := call_format.tags) is not None:
            inner = tags.separator.join(
                (
                    value if tags.text and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                ).join(tags.around(key, KINDS[type(value)]))
                for key, value in arguments.items()
            )
        written.append((name, inner))
    return call_format.write(written).replace("{index}", "3")


def merged(parts: list[Part]) -> list[Part]:
    """Returns the parts with consecutive pieces of the same part joined."""
    joined: list[Part] = []
    for part in parts:
        if joined and part.kind != "call" and joined[-1][::2] == part[::2]:
            joined[-1] = Part(part.kind, joined[-1].text + part.text, part.call)
        else:
            joined.append(part)
    return joined


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = [part.text for part in parts if part.kind == "call"]
    return list(
        zip(names, [json.loads(part.text) for part in parts if part.kind == "arguments"], strict=True)
    )


def prepared(tokenizer: Tokenizer = LM.need_tokenizer(), **chat: Any) -> Prepared:  # noqa: B008
    return Prepared(
        Chat(**{"messages": [{"role": "user", "content": "go"}], "tools": TOOLS, **chat}), tokenizer
    )


SHORT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"enum": [True, None, "x"]}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTIONS = [{"type": "function", "function": {"name": name, "parameters": SHORT}} for name in ("f", "g.h")]


def template_of(call_format: CallFormat, *extra: str) -> str:
    """Returns a chat template that is recognized as one of a family."""
    return (
        "{{ messages[0].content }}{% if tools %}{% endif %}{# "
        + " ".join([*call_format.found, *extra])
        + " #}"
    )


def accepts(prepared_chat: Prepared, text: str, tokenizer: Tokenizer = LM.need_tokenizer()) -> bool:  # noqa: B008
    """Returns whether the grammar of an answer accepts a text as the whole answer."""
    constraint, within = prepared_chat.grammar
    assert constraint is not None
    state = Grammars(tokenizer, tokenizer.vocab_size, LM.eos).compile(*constraint, within=within).copy()
    for token in tokenizer.encode(text, bos=False, eos=False, special=True):
        if not state.allowed()[token]:
            return False
        state.advance(token)
    return state.ended or bool(state.allowed()[LM.eos[0]])
