"""Chat templates: from messages to the text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.errors import DataError, did_you_mean

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its
    body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A Jinja chat template, as Hugging Face folders carry it, run in a sandbox."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.source = source
        try:
            self._template = environment.from_string(source)
        except RecursionError:
            raise DataError("chat template: it is nested too deep") from None
        except TemplateError as error:
            raise DataError(f"chat template: line {getattr(error, 'lineno', '?')}: {error}") from None

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation.  `variables` are what the template may ask for (bos_token, tools, ...).

        Raises DataError when the template refuses them, with its own words.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **variables
            )
        except TemplateError as error:
            raise DataError(f"chat template: {error}") from None
        except (TypeError, KeyError, AttributeError) as error:
            raise DataError(f"chat template: it failed on these messages: {error}") from None


def check_messages(messages: Sequence[Message]) -> None:
    """Messages are a non-empty list of mappings with "role" and "content"; names the first that is not."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise DataError(
            'a chat is a list of messages like {"role": "user", "content": "..."}, '
            f"got {type(messages).__name__}"
        )
    if not messages:
        raise DataError("a chat needs at least one message, got an empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"message {i} must be a mapping with role and content, got {message!r}")
        if not isinstance(message.get("role"), str):
            hint = did_you_mean("role", message)
            raise DataError(
                f'message {i} needs a "role" (system, user, assistant); its keys: {list(message)}{hint}'
            )
        if "content" not in message and "tool_calls" not in message:
            hint = did_you_mean("content", message)
            raise DataError(
                f'message {i} ({message["role"]}) needs "content"; its keys: {list(message)}{hint}'
            )
