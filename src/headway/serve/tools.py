"""A conversation as a model's chat template takes it: its functions and their calls, the grammar that its answer
follows, and what reads the answer. Where a template knows no functions they are described in a system message, and
called as Hermes does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from typing import Any

from headway.errors import ConfigError
from headway.serve.bodies import Chat
from headway.serve.formats import HERMES, PYTHON_TAG, CallFormat, find_format, find_reasoning
from headway.serve.grammar import WHITESPACE, check_schema
from headway.serve.markup import CallReader
from headway.serve.parts import PartReader, PlainReader
from headway.serve.structure import Asked, Function, Tool
from headway.text import Tokenizer

DESCRIBED = """You may call these functions:
<tools>
{functions}
</tools>
To call one, write
{call}
and nothing behind it; its result is given to you."""
TEXT, ANY = "TEXT: /(?s:.*)/", {"type": "object"}
FOLLOWED = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance",
            "description", "title", "$schema", "$id"}  # fmt: skip
"""Of the schemas of functions whose arguments stand between tags."""
HELD = {"enum", "const", "pattern", "format", "minLength", "maxLength", "anyOf", "allOf", "oneOf", "not"}
"""What a text between tags cannot follow; it is written as JSON then."""


class Arguments(dict[str, Any]):
    """Arguments of a call: a mapping, which is its JSON where a template writes it as text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


class Prepared:
    """A chat for a model whose tokenizer is given. Raises ConfigError for functions that are asked for and not there,
    and for calls of messages that are none."""

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
        self._chat, self._tokenizer, self._source = chat, tokenizer, source
        self.functions = [] if chat.tool_choice == "none" else [tool.function for tool in chat.tools or ()]
        choice = chat.tool_choice
        self.forced = choice.function.name if isinstance(choice, Tool) else choice == "required"
        known = find_format(source)
        self.described, self.how = known is None, known or HERMES
        self.marks = find_reasoning(source)

    @cached_property
    def ids(self) -> list[int]:
        """Those of the prompt. Raises DataError where there is no chat template, or where it refuses."""
        return self._tokenizer.render_chat(self.messages, **self.variables)

    @property
    def warnings(self) -> list[str]:
        """What is asked of the template that it does not know."""
        unknown = [name for name in self._chat.variables if name not in self._source]
        return [f"{name}: the chat template knows none; it changes nothing" for name in unknown]

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """As the template reads them."""
        messages = [_with_arguments(i, message.plain()) for i, message in enumerate(self._chat.messages)]
        if "length 9" in self._source:  # Mistral's templates take no other ids
            messages = [_with_short_ids(message) for message in messages]
        return self._in_text(messages) if self.described else messages

    @property
    def variables(self) -> dict[str, Any]:
        """What else the template is told."""
        told = [tool.model_dump(exclude_unset=True) for tool in self._chat.tools or ()]
        return self._chat.variables | ({"tools": told} if self.functions and not self.described else {})

    @property
    def shown(self) -> list[int]:
        """Control tokens that the answer is read by."""
        how = self.how if self.functions else None
        marks = "".join([*(self.marks or ()), *(_spelled(how) if how else ())])
        return [i for i in self._tokenizer.special_ids if self._tokenizer.token(i) in marks]

    def reader(self) -> PartReader:
        """What divides an answer into its parts."""
        if self.marks is None and not self.functions:
            return PlainReader()
        schemas = {function.name: function.parameters or ANY for function in self.functions}
        how = self.how if self.functions else None
        return CallReader(self.marks, self._is_inside, how, schemas)

    @property
    def grammar(self) -> tuple[Asked | None, str]:
        """What an answer may be: a grammar, None for anything, and Lark of all where more stands around it
        (`Grammars.compile`)."""
        asked = self._chat.asked_grammar
        strict = any(function.strict for function in self.functions)
        held = bool(self.functions) and (strict or asked is not None or not self._chat.parallel_tool_calls)
        if asked is None and not self.forced and not held:
            return None, ""
        think, rules = self._reasoning()
        start, more = "@answer", ""
        if self.forced or held:
            start, more = self._calls(lazily=not self.forced and asked is None)
        elif not think:
            return asked, ""
        if asked is None or self.forced:
            return ("lark", "\n".join([f"start: {think} {start}", more, rules, TEXT])), ""
        either = f"({start} | @answer)" if more else start
        return asked, "\n".join([f"start: {think} {either}", more, rules, TEXT])

    # -- parts of the grammar --------------------------------------------------------------------------

    @property
    def _is_inside(self) -> bool:
        """Whether the prompt ends within reasoning."""
        end = self._tokenizer.decode(self.ids[-32:], special=True).rstrip()
        return self.marks is not None and end.endswith(self.marks[0])

    def _reasoning(self) -> tuple[str, str]:
        """What stands before an answer, and its rules."""
        if self.marks is None:
            return "", ""
        open, close = self.marks
        rules = f"{self._ends_with('thought', close)}\nthink: thought /\\s{{0,9}}/"
        return ("think", rules) if self._is_inside else (f"({self._literal(open)} think)?", rules)

    def _calls(self, lazily: bool) -> tuple[str, str]:
        """Calls of the functions, and the rules of each; `lazily`: or text, up to what begins a call."""
        how, rules = self.how, []
        chosen = [one for one in self.functions if self.forced in (True, False, one.name)]
        for i, function in enumerate(chosen):
            rules += self._call(f"f{i}", function)
        rules.append("call: " + " | ".join(f"f{i}" for i in range(len(chosen))))
        many = self._chat.parallel_tool_calls and not isinstance(self.forced, str)
        more = f"({self._literal(how.between)} call){{0,15}}" if many else ""
        parts = [self._literal(how.open), "call", more, self._literal(how.close)]
        if not lazily:
            return f"({' '.join(filter(None, parts))})", "\n".join(rules)
        if not how.marker:
            rules.append("OTHER: /[^{\\s](?s:.*)/")
            return f"({' '.join(filter(None, parts))} | OTHER)?", "\n".join(rules)
        rules.append(self._ends_with("before", how.marker))
        rest = self._literal(how.open[how.open.index(how.marker) + len(how.marker) :])
        return f"({' '.join(filter(None, ['before', rest, *parts[1:]]))} | TEXT)", "\n".join(rules)

    def _call(self, name: str, function: Function) -> list[str]:
        before, between, behind = self.how.written
        schema, tags = {**(function.parameters or ANY), "x-guidance": WHITESPACE}, self.how.tags
        check_schema(schema)
        begin = self._literal(f"{before}{function.name}{between}")
        if tags is None:
            return [f"{name}: {begin} %json {json.dumps(schema)} {self._literal(behind)}"]
        if others := schema.keys() - FOLLOWED:
            raise ConfigError(
                f"tools: parameters of {function.name}: this model writes arguments one by one, and {sorted(others)} "
                "cannot be followed then; leave them out"
            )
        rules, parts = [], []
        shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
        for i, (key, inner) in enumerate(schema.get("properties", {}).items()):
            opening, part = self._literal(f"{tags.key}{key}{tags.end_key}{tags.value}"), f"{name}_{i}"
            if isinstance(inner, dict) and inner.get("type") == "string" and not inner.keys() & HELD:
                rules.append(self._ends_with(f"{part}_text", tags.end_value))
                rules.append(f"{part}: {opening} {part}_text")
            else:
                value = json.dumps(inner | shared if isinstance(inner, dict) else inner)
                rules.append(f"{part}: {opening} %json {value} {self._literal(tags.end_value)}")
            parts.append(part if key in schema.get("required", ()) else f"{part}?")
        return [*rules, f"{name}: {' '.join([begin, *parts, self._literal(behind)])}"]

    def _ends_with(self, name: str, mark: str) -> str:
        """A rule: text up to a mark, and the mark."""
        if self._token(mark) is not None:
            return f"{name}: TEXT {self._literal(mark)}"
        return f"{name}[suffix={json.dumps(mark, ensure_ascii=False)}]: TEXT"

    def _token(self, mark: str) -> int | None:
        """The control token that a mark is."""
        return next((i for i in self._tokenizer.special_ids if self._tokenizer.token(i) == mark), None)

    def _literal(self, text: str) -> str:
        """Text as Lark writes it, in which control tokens are tokens."""
        names = sorted((self._tokenizer.token(i) for i in self._tokenizer.special_ids), key=len, reverse=True)
        for name in names:
            if name and name in text:
                before, _, behind = text.partition(name)
                token = f"<[{self._token(name)}]>"
                return " ".join(filter(None, [self._literal(before), token, self._literal(behind)]))
        return json.dumps(text, ensure_ascii=False) if text else ""

    # -- templates that know no functions --------------------------------------------------------------

    def _in_text(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made = []
        for message in messages:
            calls, role = message.get("tool_calls") or (), message["role"]
            written = "\n".join(
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in calls
            )
            content = "\n".join(filter(None, [message["content"], written]))
            if role == "tool":
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            made.append(
                {**{k: v for k, v in message.items() if k != "tool_calls"}, "role": role, "content": content}
            )
        if not self.functions:
            return made
        told = [function.model_dump(exclude_unset=True, exclude={"strict"}) for function in self.functions]
        call = "".join([HERMES.open, '{"name": FUNCTION, "arguments": {...}}', HERMES.close])
        lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in told)
        described = DESCRIBED.format(functions=lines, call=call)
        if made[0]["role"] == "system":
            return [{**made[0], "content": f"{made[0]['content']}\n\n{described}"}, *made[1:]]
        return [{"role": "system", "content": described}, *made]


def _with_arguments(i: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message in which the arguments of calls are mappings."""
    if not message.get("tool_calls"):
        return message
    calls = []
    try:
        for call in message["tool_calls"]:
            given = call["function"].get("arguments") or "{}"
            read = json.loads(given) if isinstance(given, str) else given
            calls.append({**call, "function": {**call["function"], "arguments": Arguments(read)}})
            call["function"]["name"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f"messages.{i}.tool_calls: a call is {{id, type, function: {{name, arguments}}}}, whose arguments are the "
            "JSON of an object"
        ) from None
    return {**message, "tool_calls": calls}


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    def short(name: Any) -> str:
        return sha256(str(name).encode()).hexdigest()[:9]

    calls = [{**call, "id": short(call.get("id"))} for call in message.get("tool_calls") or ()]
    own = {"tool_call_id": short(message["tool_call_id"])} if "tool_call_id" in message else {}
    return {**message, **({"tool_calls": calls} if calls else {}), **own}


def _spelled(how: CallFormat) -> list[str]:
    """All that a format writes around names and arguments."""
    return [
        how.open,
        how.between,
        how.close,
        *(how.head or ()),
        *(how.tags or ()),
        "" if how.marker else PYTHON_TAG,
    ]
