"""Functions, calls of them as families write them, and chats that ask for them."""

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
IDS = [how.found[-1] for how in FORMATS]
FRAMED = {"functions.": HARMONY, "<atem:invoke": ATEM, "argument": KIMI}
"""Reasoning of families that have marks around their texts, too."""


KINDS = {type(None): "null", bool: "boolean", int: "number", str: "string", list: "array", dict: "object"}


def spelled(how: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a family writes them."""
    written = []
    for name, arguments in calls:
        inner = json.dumps(arguments, ensure_ascii=False)
        if (tags := how.tags) is not None:
            inner = tags.separator.join(
                (
                    value if tags.text and isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                ).join(tags.around(key, KINDS[type(value)]))
                for key, value in arguments.items()
            )
        written.append((name, inner))
    return how.write(written).replace("{index}", "3")


def merged(parts: list[Part]) -> list[Part]:
    """Pieces of one part together."""
    found: list[Part] = []
    for part in parts:
        if found and part.kind != "call" and found[-1][::2] == part[::2]:
            found[-1] = Part(part.kind, found[-1].text + part.text, part.call)
        else:
            found.append(part)
    return found


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


def template_of(how: CallFormat, *more: str) -> str:
    """A chat template that is found to be of a family."""
    return "{{ messages[0].content }}{% if tools %}{% endif %}{# " + " ".join([*how.found, *more]) + " #}"


def accepts(one: Prepared, text: str, tokenizer: Tokenizer = LM.need_tokenizer()) -> bool:  # noqa: B008
    """Whether the grammar of an answer lets a text be all of it."""
    asked, within = one.grammar
    assert asked is not None
    state = Grammars(tokenizer, tokenizer.vocab_size, LM.eos).compile(*asked, within=within).copy()
    for token in tokenizer.encode(text, bos=False, eos=False, special=True):
        if not state.allowed()[token]:
            return False
        state.advance(token)
    return state.ended or bool(state.allowed()[LM.eos[0]])
