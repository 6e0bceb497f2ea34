"""A conversation prepared for a model's chat template: its tools and calls, the grammar of the answer, and its parser.
If a template does not know tools, a system message describes them, and calls use the Hermes format."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from typing import Any

from headway.errors import ConfigError
from headway.serve.bodies import Chat
from headway.serve.formats import HERMES, PYTHON_TAG, Tags, find_format, find_reasoning
from headway.serve.grammar import WHITESPACE, Asked, Function, Tool, check_schema
from headway.serve.markup import CallReader
from headway.serve.notations import HELD, Arguments
from headway.text import Tokenizer

DESCRIBED = """You may call these functions:
<tools>
{functions}
</tools>
To call one, write
{call}
and nothing behind it; its result is given to you."""
TERMINALS = "TEXT: /(?s:.*)/\nINDEX: /[0-9]{1,3}/\nTYPE: /number|boolean|null|object|array/"
DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}
"""Template variables for today's date, and their formats."""
ANY, SHARED = {"type": "object"}, ("$defs", "definitions", "x-guidance")
FOLLOWED = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance",
            "description", "title", "$schema", "$id"}  # fmt: skip
"""Schema keys that are enforced if arguments are written between tags."""
KINDS = {"integer": "number", **{kind: kind for kind in ("number", "boolean", "null", "object", "array")}}
SCALARS = {"string", "number", "integer", "boolean", "null"}


class Prepared:
    """A chat prepared for a model with the given tokenizer. Raises ConfigError for malformed calls in messages."""

    def __init__(self, chat: Chat, tokenizer: Tokenizer) -> None:
        source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
        self.chat, self._tokenizer, self._source = chat, tokenizer, source
        self.functions = [] if chat.tool_choice == "none" else [tool.function for tool in chat.tools or ()]
        choice = chat.tool_choice
        self.forced = choice.function.name if isinstance(choice, Tool) else choice == "required"
        self._known = find_format(source)
        self.described, self.how = self._known is None or "tools" not in source, self._known or HERMES
        self.marks = find_reasoning(source)

    @cached_property
    def ids(self) -> list[int]:
        """Token ids of the prompt. Raises DataError if there is no chat template, or if it refuses the messages."""
        goes_on, variables = self.chat.continues, self.variables
        return self._tokenizer.render_chat(self.messages, continue_final_message=goes_on, **variables)

    @property
    def warnings(self) -> list[str]:
        """Warnings about variables and calls that the template does not know."""
        unknown = [name for name in self.chat.variables if name not in self._source]
        lines = [f"{name} is unknown to the chat template and was ignored" for name in unknown]
        if self.functions and self._known is None and "tool_calls" in self._source:
            lines.append("tools: the chat template's call format is unknown; the Hermes format is used")
        return lines

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The messages in the form that the template expects."""
        messages = [_with_arguments(i, message.plain()) for i, message in enumerate(self.chat.messages)]
        if "length 9" in self._source:  # Mistral's templates accept only ids of 9 characters
            messages = [_with_short_ids(message) for message in messages]
        # gpt-oss accepts only one of them before a call
        if "message.content and message.thinking" in self._source:
            for message in messages:
                if message["content"] and message.get("tool_calls"):
                    message.pop("reasoning_content", None)
        if self.described or "tool_calls" not in self._source:
            messages = [self._with_calls(message) for message in messages]
        return self._told(messages) if self.described and self.functions else messages

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template, besides the messages."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.chat.tools or ()]
        listed = tools if self.functions and not self.described else []
        named: dict[str, Any] = {"functions": json.dumps(listed, ensure_ascii=False)}  # for Firefunction
        named |= {name: f"{datetime.now():{form}}" for name, form in DATES.items()}
        return named | self.chat.variables | ({"tools": listed} if listed else {})

    @property
    def shown(self) -> list[int]:
        """Control tokens that divide the answer into its parts, and must be part of its text."""
        of_calls = self.how, "" if self.how.marker else PYTHON_TAG
        marks = repr((self.marks, of_calls if self.functions else ()))
        return [i for i in self._tokenizer.special_ids if self._tokenizer.token(i) in marks]

    def reader(self) -> CallReader:
        """Returns a parser that divides an answer into its parts."""
        schemas = {function.name: function.parameters or ANY for function in self.functions}
        inside = self.marks is not None and self._end.endswith(self.marks.open.strip())
        return CallReader(self.marks, inside, self.how if self.functions else None, schemas)

    @property
    def grammar(self) -> tuple[Asked | None, str]:
        """The grammar of the answer, or None, and Lark of the whole text if the grammar covers a part of it
        (`Grammars.compile`)."""
        asked = self.chat.asked_grammar
        strict = any(function.strict for function in self.functions)
        held = bool(self.functions) and (strict or asked is not None or not self.chat.parallel_tool_calls)
        if asked is None and not self.forced and not held:
            return None, ""
        rules = [TERMINALS]
        think, before, behind = self._reasoning(rules)
        answer = f"({before} @answer {behind})"
        if self.forced or held:
            calls = self._calls(rules, lazily=not self.forced and asked is None)
            if asked is None or self.forced:
                return ("lark", "\n".join([f"start: {think} {calls}", *rules])), ""
            answer = f"({calls} | {answer})"
        elif not think:
            return asked, ""
        return asked, "\n".join([f"start: {think} {answer}", *rules])

    # -- parts of the grammar --------------------------------------------------------------------------

    @cached_property
    def _end(self) -> str:
        """The end of the prompt's text."""
        return self._tokenizer.decode(self.ids[-32:], special=True).rstrip()

    def _reasoning(self, rules: list[str]) -> tuple[str, str, str]:
        """Returns Lark of the reasoning before an answer, and of the marks before and after the answer's text."""
        open, close, _, frame = self.marks or ("", "", "", ())
        before, behind = ("" if self._end.endswith(mark) else mark for mark in (*frame, "", "")[:2])
        around = self._literal(before), self._literal(behind)
        rules.append(f"said: {around[0]} said_text\n{self._ends_with('said_text', behind)}")
        if self.marks is None:
            return "", *around
        rules += [self._ends_with("thought", close), "think: thought /\\s{0,9}/"]
        inside = self._end.endswith(open.strip())
        return ("think" if inside else f"({self._literal(open)} think)?"), *around

    def _calls(self, rules: list[str], lazily: bool) -> str:
        """Returns Lark of calls of the functions; with `lazily`, of free text that may be followed by calls."""
        how = self.how
        chosen = [function for function in self.functions if self.forced in (True, False, function.name)]
        for i, function in enumerate(chosen):
            self._call(rules, f"f{i}", function)
        rules.append("call: " + " | ".join(f"f{i}" for i in range(len(chosen))))
        many = self.chat.parallel_tool_calls and not isinstance(self.forced, str)
        more_calls = f"({self._literal(how.between)} call){{0,15}}" if many else ""
        calls = f"call {more_calls} {self._literal(how.close)}"
        whole = f"{self._literal(how.open)} {calls}"
        if not lazily:
            return f"({whole})"
        if not how.marker:
            rules.append("OTHER: /[^{\\s](?s:.*)/")
            return f"({whole} | OTHER)?"
        if self.marks is not None and self.marks.frame:
            return f"(said? {whole} | said)"
        rules.append(self._ends_with("before", how.marker))
        marker_end = self._literal(how.open[how.open.index(how.marker) + len(how.marker) :])
        return f"(before {marker_end} {calls} | said)"

    def _call(self, rules: list[str], name: str, function: Function) -> None:
        """Adds the rule of a call. Raises ConfigError for schemas that cannot be enforced in the model's notation."""
        before, between, behind = self.how.head
        schema, tags = {**(function.parameters or ANY), "x-guidance": WHITESPACE}, self.how.tags
        check_schema(schema)
        arguments = f"%json {json.dumps(schema)}"
        if tags is not None:
            if unsupported := schema.keys() - FOLLOWED:
                raise ConfigError(
                    f"tools: parameters of {function.name}: {sorted(unsupported)} cannot be enforced, since this model "
                    "writes arguments one by one; leave them out"
                )
            parts = []
            shared = {key: schema[key] for key in SHARED if key in schema}
            for i, (key, inner) in enumerate(schema.get("properties", {}).items()):
                rules.append(self._argument(tags, f"{name}_{i}", key, inner, shared))
                parts.append((f"{name}_{i}", key in schema.get("required", ())))
            arguments = _in_order(parts, self._literal(tags.separator))
        opening, closing = map(
            self._literal, (before + function.name + between.replace("{name}", function.name), behind)
        )
        rules.append(f"{name}: {opening} {arguments} {closing}")

    def _argument(self, tags: Tags, name: str, key: str, schema: Any, shared: dict[str, Any]) -> str:
        """Returns the rules of an argument: verbatim text, or JSON. Raises ConfigError for a schema that cannot be
        enforced."""
        inner = schema if isinstance(schema, dict) else {}
        kind, choices = inner.get("type"), inner.get("enum", [inner["const"]] if "const" in inner else [])
        if not tags.nested and not choices and kind not in SCALARS:
            raise ConfigError(
                f"tools: {key}: this model writes objects and lists in its own notation, in which no schema can be "
                f"enforced; give one type of {', '.join(sorted(SCALARS))}, or leave out strict and tool_choice"
            )
        if tags.text is not None and kind == "string" and not inner.keys() & HELD:
            opening, end = tags.around(key, "string")
            if choices:
                texts = " | ".join(self._literal(text) for text in choices if isinstance(text, str))
                return f"{name}: {self._literal(opening)} ({texts}) {self._literal(end)}"
            return f"{self._ends_with(f'{name}_text', end)}\n{name}: {self._literal(opening)} {name}_text"
        opening, end = tags.around(key, KINDS.get(str(kind), "{type}"))
        value = json.dumps(inner | shared if inner else schema)
        return f"{name}: {self._literal(opening)} %json {value} {self._literal(end)}"

    def _ends_with(self, name: str, mark: str) -> str:
        """Returns a rule: text up to a mark, and the mark."""
        if not mark or self._literal(mark).startswith("<["):  # TEXT never matches a control token
            return f"{name}: TEXT {self._literal(mark)}"
        return f"{name}[suffix={json.dumps(mark, ensure_ascii=False)}]: TEXT"

    def _literal(self, text: str) -> str:
        """Returns text as Lark, with control tokens as tokens, "{index}" as a number and "{type}" as a type."""
        names = {self._tokenizer.token(i): f"<[{i}]>" for i in self._tokenizer.special_ids}
        names |= {"{index}": "INDEX", "{type}": "TYPE"}
        for name in sorted(names, key=len, reverse=True):
            if name and name in text:
                before, _, behind = text.partition(name)
                return " ".join(filter(None, [self._literal(before), names[name], self._literal(behind)]))
        return json.dumps(text, ensure_ascii=False) if text else ""

    # -- templates that know no functions, or no calls -------------------------------------------------

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message whose calls, or result, have become text."""
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := [call["function"] for call in message.get("tool_calls") or ()]:
            written = self.how.write((call["name"], self._arguments(call["arguments"])) for call in calls)
            plain["content"] = "\n".join(filter(None, [message["content"], written]))
        if self.described and message["role"] == "tool":
            plain |= {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        return plain

    def _arguments(self, arguments: Arguments) -> str:
        """Returns arguments as text: JSON, or one by one between tags."""
        if (tags := self.how.tags) is None:
            return str(arguments)
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in arguments.items()}
        return tags.separator.join(text.join(tags.around(key, "")) for key, text in texts.items())

    def _told(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages with a description of the functions in the system message."""
        schemas = [function.model_dump(exclude_unset=True, exclude={"strict"}) for function in self.functions]
        call = self.how.write([("FUNCTION", "{...}")])
        functions = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        described = DESCRIBED.format(functions=functions, call=call)
        if messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}, *messages[1:]]
        return [{"role": "system", "content": described}, *messages]


def _in_order(parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """Returns Lark of parts in order with separators between them; a part that is not required may be missing."""
    # a? b c? with ",": (a ("," b) ("," c)? | b ("," c)?): one alternative for each part that may come first
    following = [f"({separator} {part})" + ("" if needed else "?") for part, needed in parts]
    if not separator or not parts:
        return " ".join(following)
    first = next((i for i, (_, needed) in enumerate(parts) if needed), len(parts))
    rows = [" ".join([part, *following[i + 1 :]]) for i, (part, _) in enumerate(parts[: first + 1])]
    return f"({' | '.join(rows)})" + ("?" if first == len(parts) else "")


def _with_arguments(i: int, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls have dicts as arguments. Raises ConfigError for a malformed call."""
    if not message.get("tool_calls"):
        return message
    calls = []
    try:
        for call in message["tool_calls"]:
            arguments = call["function"].get("arguments") or "{}"
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append({**call, "function": {**call["function"], "arguments": Arguments(read)}})
            call["function"]["name"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f"messages.{i}.tool_calls: a call must be {{id, type, function: {{name, arguments}}}}, with a JSON object "
            "as arguments"
        ) from None
    return {**message, "tool_calls": calls}


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    def short(name: Any) -> str:
        return sha256(str(name).encode()).hexdigest()[:9]

    calls = [{**call, "id": short(call.get("id"))} for call in message.get("tool_calls") or ()]
    result = {"tool_call_id": short(message["tool_call_id"])} if "tool_call_id" in message else {}
    return {**message, **({"tool_calls": calls} if calls else {}), **result}
