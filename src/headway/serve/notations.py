"""Parses arguments of calls to JSON: values between tags, and notations of their own (Python's, Gemma's, MiniMax's
XML)."""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson

Calls = list[tuple[str, str]]
"""Names of functions, each with its arguments as JSON."""
HELD = {"pattern", "format", "minLength", "maxLength", "anyOf", "allOf", "oneOf", "not"}
"""Schema keys that text between tags cannot be constrained to; with them, strings are written as JSON."""
LITERALS = {"array", "object", "boolean", "integer", "number", "null"}
"""Types whose values some models write as Python literals: True, ['a']."""
_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[^\s{}]+)\s*(?P<arguments>{.*})\s*", re.DOTALL)
_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|"(?:[^"\\]|\\.)*"|([^\s{}\[\],:"<>]+)(?=\s*:)', re.DOTALL)
_MINIMAX, _INVOKE = "]<]minimax[>[", re.compile(r'invoke name="([^"]+)"')


class Arguments(dict[str, Any]):
    """Arguments of a call: a dict that turns into JSON if a template uses it as text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


def loaded(text: str) -> Any:
    """Returns the value of JSON text, or None if it is invalid."""
    try:
        return orjson.loads(text)
    except ValueError:
        return None


def dumped(value: Any) -> str:
    """Returns a value as JSON. Raises TypeError for a value that JSON does not have."""
    return orjson.dumps(value).decode()


def json_of(text: str, schema: Any) -> str:
    """Returns a value between tags as JSON. Valid JSON stays as it is, a Python literal is converted if the schema's
    type is in `LITERALS`, and anything else, like any value whose type is "string", is a string."""
    value, schema = loaded(text), schema if isinstance(schema, dict) else {}
    if schema.get("type") == "string":
        return text if isinstance(value, str) and schema.keys() & HELD else dumped(text)
    if value is None and str(schema.get("type")) in LITERALS:
        with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return dumped(ast.literal_eval(text.strip()))
    return text if value is not None or text == "null" else dumped(text)


def _object(values: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{dumped(key)}: {value}' for key, value in values.items())}}}"


def python_calls(text: str, schemas: Mapping[str, Any]) -> Calls:
    """Parses [f(city="Paris", n=5), g()], whose values are Python literals or JSON; empty if it is anything else."""
    text, calls = text.strip(), []
    try:
        tree = ast.parse(text, mode="eval").body
        for call in tree.elts if isinstance(tree, ast.List) else [tree]:
            if not isinstance(call, ast.Call) or call.args:
                return []
            values = {str(word.arg): ast.get_source_segment(text, word.value) or "" for word in call.keywords}
            for key, value in values.items():
                if loaded(value) is None and value != "null":
                    values[key] = dumped(ast.literal_eval(value))
            calls.append((ast.unparse(call.func), _object(values)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []
    return calls


def gemma_calls(text: str, schemas: Mapping[str, Any]) -> Calls:
    """Parses call:f{city:<|"|>Paris<|"|>,n:5}: keys are bare, and strings between marks; empty if it is anything
    else."""

    def as_json(piece: re.Match[str]) -> str:
        inner = piece[2] if piece[1] is None else piece[1]
        return piece[0] if inner is None else dumped(inner)

    if call := _GEMMA_CALL.fullmatch(text):
        arguments = _GEMMA.sub(as_json, call["arguments"])
        return [(call["name"], arguments)] if loaded(arguments) is not None else []
    return []


def xml_calls(text: str, schemas: Mapping[str, Any]) -> Calls:
    """Parses <invoke name="f"><city>Paris</city><days><item>1</item></days></invoke>, with a mark before each tag;
    empty if an element is not closed."""
    open: list[tuple[str, str, list[Any]]] = [("", "", [])]
    for piece in text.split(_MINIMAX)[1:]:
        tag, _, inner = piece.removeprefix("<").partition(">")
        if not tag.startswith("/"):
            open[-1][2].append((tag, inner, []))
            open.append(open[-1][2][-1])
        elif open.pop()[0].partition(" ")[0] != tag[1:]:
            return []
    named = [(_INVOKE.fullmatch(tag), elements) for tag, _, elements in open[0][2]]
    if len(open) > 1 or not all(name for name, _ in named):
        return []
    return [
        (name[1], _element("", elements, {"type": "object", **(schemas.get(name[1]) or {})}))
        for name, elements in named
        if name
    ]


def _element(text: str, elements: list[Any], schema: Any) -> str:
    schema = schema if isinstance(schema, dict) else {}
    kind = schema.get("type")
    if kind == "array" or (elements and kind != "object" and all(tag == "item" for tag, *_ in elements)):
        return f"[{', '.join(_element(text, inner, schema.get('items')) for _, text, inner in elements)}]"
    if kind == "object" or elements:
        properties = schema.get("properties") or {}
        return _object({tag: _element(text, inner, properties.get(tag)) for tag, text, inner in elements})
    return json_of(text, schema)
